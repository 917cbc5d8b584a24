"""A stand-in for slime's `Sample` with the order in which slime appends tokens and applies meta_info, and answers as an
engine with our plugin gives them (their spans come from the plugin's own RequestTrace)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from slime_backend.engine_plugin.trace import Admission, RequestTrace
from slime_backend.wire import Span


@dataclass
class FakeSample:
    group_index: int | None = 0
    index: int | None = 0
    prompt: str = "q"
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    reward: Any = 1.0
    status: str = "completed"
    metadata: dict[str, Any] | None = field(default_factory=dict)
    session_id: str | None = None
    remove_sample: bool = False

    def append_response_tokens(self, args=None, *, tokens, log_probs=None, trainable=True, meta_info=None, final=True):
        self.tokens = [*self.tokens, *tokens]
        self.loss_mask = [*(self.loss_mask or []), *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *(log_probs or [0.0] * len(tokens))]
        self.response_length += len(tokens)
        if meta_info is not None:
            self._apply_meta_info(args, meta_info, new_token_count=len(tokens), update_terminal_info=final)

    def _apply_meta_info(
        self, args, meta_info, *, new_token_count=0, pad_missing_top_p=False, update_terminal_info=True
    ):
        if update_terminal_info:
            self.status = {"abort": "aborted"}.get(meta_info["finish_reason"]["type"], "completed")


def answer(prompt: int, tokens: int, versions: list[str], at: int | None = None, finish: str = "stop", **more):
    """meta_info of a request over `prompt` tokens that sampled `tokens`, retracted and prefilled again after token `at`
    where there are two versions."""
    trace = RequestTrace(prompt_length=prompt)
    trace.admit(Admission(0, 1, 0, prompt), sampled=0)
    if at is not None:
        trace.publish(0, committed=None, sampled=at)
        trace.admit(Admission(1, 0, 0, prompt + at), sampled=at)
    last = len(versions) - 1
    segments = trace.kv_segments(last, tokens, versions.__getitem__)
    return {
        "finish_reason": {"type": finish},
        "prompt_tokens": prompt,
        "weight_versions": [asdict(Span(s.version, s.start, s.end)) for s in segments],
        "kv_provenance": [asdict(s) for s in segments],
        "prefills": [asdict(p) for p in trace.prefills(versions.__getitem__)],
        **more,
    }


def generate(sample: FakeSample, meta_info: dict[str, Any], tokens: int, first: int = 100) -> None:
    sample.append_response_tokens(
        tokens=list(range(first, first + tokens)), log_probs=[-0.5] * tokens, meta_info=meta_info
    )
