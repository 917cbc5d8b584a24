"""What a slime `Sample` remembers of the generate calls that its response came from. Duck-typed: no slime, no torch.

A response may take several calls: one per turn, and one more after each abort that put the sample back into slime's
buffer. Each call's spans count from its own first token; here they are shifted to the response:

    sample.tokens    |--- prompt ---|== call 1 ==|- tool answer -|==== call 2 ====|
    response                        0            5               9                16
    call 1           start 0,  end 5,   context over sample.tokens 0 .. len(prompt) + 4
    call 2           start 9,  end 16,  context over sample.tokens 0 .. len(prompt) + 15

A context's positions need no shift where a call's prompt is the sample's tokens so far, as it is in slime's own rollout
functions. One that sent anything else is `placed: False`: its sampled spans hold, its context can't be checked.

The calls lie in `sample.metadata` as plain JSON, so they survive copies, slime's buffer and its saved rollout data.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slime_backend.provenance.record_checks import why_no_logprobs
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import (
    KV_PROVENANCE_KEY,
    PREFILLS_KEY,
    SAMPLED_SPANS_KEY,
    KvSegment,
    Prefill,
    Span,
)

log = logging.getLogger(__name__)

METADATA_KEY = "reef_slime"


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One finished request of a sample. `start`, `end`, spans and segments are response positions."""

    receipt: str
    start: int
    end: int
    placed: bool  # its prompt was the sample's tokens so far
    finish_reason: str
    submitted_at: float  # seconds since the epoch
    finished_at: float
    spans: tuple[Span, ...]
    segments: tuple[KvSegment, ...]  # () where the engine reported none
    prefills: tuple[Prefill, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GenerateCall:
        values = {f.name: data[f.name] for f in fields(cls)}
        values["spans"] = tuple(Span.from_json(s) for s in data["spans"])
        values["segments"] = tuple(KvSegment.from_json(s) for s in data["segments"])
        values["prefills"] = tuple(Prefill.from_json(p) for p in data["prefills"])
        return cls(**values)


def notes(sample: Any) -> dict[str, Any]:
    """Our part of a sample's metadata, made where it isn't there yet."""
    if sample.metadata is None:
        sample.metadata = {}
    found: dict[str, Any] = sample.metadata.setdefault(METADATA_KEY, {})
    return found


def calls_of(sample: Any) -> list[GenerateCall]:
    """The finished calls of a sample, oldest first."""
    noted = ((sample.metadata or {}).get(METADATA_KEY) or {}).get("calls", [])
    return [GenerateCall.from_json(call) for call in noted]


def note_call(sample: Any, meta_info: Mapping[str, Any], new_tokens: int) -> None:
    """Remember a call whose `new_tokens` tokens were just appended to the response.

    `meta_info`: SGLang's, of the answer. A call that sampled nothing leaves no note, nor does one without sampled spans
    (an engine before 0.5.23 without our hook). Raises WireError where spans have another form than the wire contract's.
    """
    if new_tokens <= 0 or SAMPLED_SPANS_KEY not in meta_info:
        return
    start = sample.response_length - new_tokens
    before = len(sample.tokens) - new_tokens  # positions of sample.tokens that the call should have had as its prompt
    now = time.time()
    segments = [KvSegment.from_json(s) for s in meta_info.get(KV_PROVENANCE_KEY) or ()]
    call = GenerateCall(
        receipt=uuid.uuid4().hex,
        start=start,
        end=start + new_tokens,
        placed=meta_info.get("prompt_tokens") == before,
        finish_reason=str((meta_info.get("finish_reason") or {}).get("type", "unknown")),
        submitted_at=now - float(meta_info.get("e2e_latency") or 0.0),
        finished_at=now,
        spans=tuple(_shifted(Span.from_json(s), start) for s in meta_info[SAMPLED_SPANS_KEY]),
        segments=tuple(replace(s, start=s.start + start, end=s.end + start) for s in segments),
        prefills=tuple(Prefill.from_json(p) for p in meta_info.get(PREFILLS_KEY) or ()),
    )
    notes(sample).setdefault("calls", []).append(json.loads(json.dumps(asdict(call))))  # lists for tuples


def response_spans(sample: Any) -> tuple[Span, ...]:
    """Who sampled what, over the response. Tool answers, and tokens that came without spans, are in none of them."""
    return tuple(
        Span(s.version, s.start, min(s.end, sample.response_length))
        for call in calls_of(sample)
        for s in call.spans
        if s.start < sample.response_length  # a rollout function may have cut the response since
    )


def record_of(
    sample: Any, call: GenerateCall, *, group: str, engine: str, temperature: float, reward: float
) -> RolloutRecord | None:
    """The record of one call; None where its context can't be placed, or the engine reported none, or the response was
    cut behind it, or a log-prob is no number, which is logged."""
    if not call.placed or not call.segments or sample.rollout_log_probs is None or call.end > sample.response_length:
        return None
    logprobs = sample.rollout_log_probs[call.start : call.end]
    why = why_no_logprobs(logprobs, {SAMPLED_SPANS_KEY: [asdict(s) for s in call.spans]}, call.start)
    if why:
        log.error("%s: rollout %s is not recorded: %s", engine, call.receipt, why)
        return None
    first = len(sample.tokens) - sample.response_length + call.start  # where the call's output begins
    length = call.end - call.start
    return RolloutRecord(
        receipt=call.receipt,
        group=group,
        engine=engine,
        question=sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt),
        prompt_ids=tuple(int(t) for t in sample.tokens[:first]),
        output_ids=tuple(int(t) for t in sample.tokens[first : first + length]),
        logprobs=tuple(float(p) for p in logprobs),
        temperature=temperature,
        reward=reward,
        finish_reason=call.finish_reason,
        spans=tuple(_shifted(s, -call.start) for s in call.spans),
        segments=tuple(replace(s, start=s.start - call.start, end=s.end - call.start) for s in call.segments),
        prefills=call.prefills,
        submitted_at=call.submitted_at,
        finished_at=call.finished_at,
        session=str(getattr(sample, "session_id", None) or f"{group}-{sample.index}"),
    )


def _shifted(span: Span, by: int) -> Span:
    return Span(span.version, span.start + by, span.end + by)
