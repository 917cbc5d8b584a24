"""One rollout with everything that is known of where its tokens came from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from slime_backend.provenance import classes
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.kv_contexts import read_segments, shorten
from slime_backend.provenance.record_checks import check_answer, check_stored, output_logprobs
from slime_backend.provenance.sampling_params import transforming
from slime_backend.wire import (
    KV_PROVENANCE_KEY,
    PREFILLS_KEY,
    SAMPLED_SPANS_KEY,
    KvSegment,
    Prefill,
    Span,
    WireError,
)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A finished request. Spans and segments are over output tokens, contexts over prompt + output positions."""

    receipt: str
    group: str
    engine: str
    question: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log, of the sampled tokens, by the version that sampled them
    temperature: float
    reward: float
    finish_reason: str
    spans: tuple[Span, ...]  # sampled spans
    segments: tuple[KvSegment, ...]  # KV spans
    prefills: tuple[Prefill, ...]
    submitted_at: float  # seconds since the epoch
    finished_at: float
    attempts: int = 1  # times the request was sent until an engine in good standing answered it
    session: str = ""  # what belongs together: a conversation of several requests, or the group of the local trainer
    # Sampling parameters that change the distribution, by SGLang's names: sampling_params.py. Stored if there are any.
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def from_answer(
        cls,
        answer: Mapping[str, Any],
        *,
        receipt: str,
        group: str,
        engine: str,
        question: str,
        prompt_ids: Sequence[int],
        temperature: float,
        reward: float,
        submitted_at: float,
        attempts: int = 1,
        session: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> RolloutRecord:
        """Build a record from SGLang's /generate answer (with `return_logprob`) of an engine with our plugin.

        Without a `session` its group is taken for one. `sampling`: the request's sampling_params. Raises RecordError
        where the answer lacks provenance, has a different number of log-probs than tokens, or a log-prob that is no
        number.
        """
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if not isinstance(meta, Mapping):
            raise RecordError(f"{engine}: rollout {receipt}: the answer has no meta_info")
        try:
            check_answer(meta, {SAMPLED_SPANS_KEY: "spans", KV_PROVENANCE_KEY: "segments", PREFILLS_KEY: "prefills"})
            spans = tuple(Span.from_json(s) for s in meta[SAMPLED_SPANS_KEY])
            segments = tuple(KvSegment.from_json(s) for s in meta[KV_PROVENANCE_KEY])
            prefills = tuple(Prefill.from_json(p) for p in meta[PREFILLS_KEY])
        except (KeyError, TypeError, WireError, RecordError) as error:
            raise RecordError(
                f"{engine}: the answer has no usable provenance ({error}); is the kv_spans hook active?"
            ) from error
        output, logprobs = output_logprobs(answer, engine, receipt)
        finish = meta.get("finish_reason")
        finish = finish if isinstance(finish, Mapping) else {}
        return cls(
            receipt,
            group,
            engine,
            question,
            tuple(prompt_ids),
            output,
            logprobs,
            temperature,
            reward,
            str(finish.get("type", "unknown")),
            spans,
            segments,
            prefills,
            submitted_at,
            time.time(),
            attempts,
            group if session is None else session,
            transforming(sampling or {}),
        )

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that sampled it, oldest first."""
        return tuple(dict.fromkeys(s.version for s in self.spans))

    @property
    def retractions(self) -> int:
        """How often its KV was taken away and prefilled again."""
        return max(0, len(self.prefills) - 1)

    @property
    def rollout_class(self) -> classes.RolloutClass:
        """One of `classes.CLASSES`, the strongest trait; written to the file as `class`, never read from it."""
        return classes.classify(self.spans, self.segments, self.prefills)

    @property
    def traits(self) -> tuple[classes.RolloutClass, ...]:
        """Every class whose description fits, weakest first."""
        return classes.traits(self.spans, self.segments, self.prefills)

    @property
    def mixed(self) -> bool:
        """Sampled by more than one version."""
        return classes.is_mixed(self.spans)

    @property
    def carried(self) -> bool:
        """Some token was sampled over KV that another version had computed."""
        return classes.is_carried(self.segments)

    @property
    def measured(self) -> bool:
        """The slots of all of its KV were read."""
        return bool(self.segments) and all(segment.measured for segment in self.segments)

    @property
    def contradicted(self) -> bool:
        """Some of its KV was written by other weights than its record claims, by the stamps of the slots."""
        return any(segment.contradicted for segment in self.segments)

    @property
    def crossing(self) -> bool:
        """It lived through a publication, or was retracted: where a fault would show first."""
        return self.mixed or self.carried or self.retractions > 0

    def to_json(self) -> dict[str, Any]:
        """Written out by hand: `asdict` copies thousands of token ids one by one, and this is once per rollout."""
        data = {name: getattr(self, name) for name in _PLAIN}
        if self.sampling:
            data["sampling"] = dict(self.sampling)
        data["spans"] = [s.to_json() for s in self.spans]
        data["segments"] = shorten(self.segments)
        data["prefills"] = [p.to_json() for p in self.prefills]
        return {**data, "class": self.rollout_class}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutRecord:
        """Raises RecordError for anything but a complete rollout."""
        if not isinstance(data, Mapping):
            raise RecordError(f"a stored rollout is a {type(data).__name__}, not an object")
        names = {f.name for f in fields(cls)}
        missing = names - set(data) - {"attempts", "session", "sampling"}
        if missing:
            raise RecordError(f"a stored rollout lacks {', '.join(sorted(missing))}")
        check_stored(data)
        values = {k: v for k, v in data.items() if k in names}
        values.setdefault("session", data["group"])
        for name in ("prompt_ids", "output_ids", "logprobs"):
            values[name] = tuple(values[name])
        values["spans"] = tuple(Span.from_json(s) for s in data["spans"])
        values["segments"] = read_segments(data["segments"])
        values["prefills"] = tuple(Prefill.from_json(p) for p in data["prefills"])
        return cls(**values)


_PLAIN = tuple(f.name for f in fields(RolloutRecord) if f.name not in ("spans", "segments", "prefills", "sampling"))
