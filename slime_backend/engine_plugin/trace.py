"""Which weights sampled a request's tokens and which computed the KV they were sampled from: one request's record.

Pure: no SGLang, no I/O. The record changes only when something happens to the request, never per token:

    admit     its KV is (re)built from nothing: a first prefill, or the prefill after a retract
    publish   the weights change: a request that holds KV keeps it, one that was retracted holds none

Positions count prompt and output tokens together; the KV of the last sampled token is written when the next token is
computed, so n output tokens were sampled from the KV of positions 0 .. prompt_length + n - 1 (end excluded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slime_backend.wire import KvSegment, Prefill, Span

Label = Callable[[int], str]
UNWRITTEN = -1  # instead of an epoch: no pass of this process has written the slot


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """Positions start .. end (end excluded) whose KV one weight epoch computed."""

    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EpochSegment:
    """Output tokens start .. end, the weight epoch that sampled them, and the KV that they were sampled from."""

    start: int
    end: int
    epoch: int
    context: tuple[EpochSpan, ...]
    admission: int = 0  # whose KV it is


@dataclass(frozen=True, slots=True)
class Admission:
    """One admission to prefill; the fields of `wire.Prefill` before its version has a name."""

    epoch: int
    order: int
    cached: int
    total: int


@dataclass(slots=True)
class RequestTrace:
    """Record of one request. `sampled` arguments count the output tokens that were sampled so far."""

    prompt_length: int
    segments: list[EpochSegment] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    _context: list[EpochSpan] = field(default_factory=list)  # of the KV held now, up to the last publication
    _segment_start: int = 0
    # By admission: the epochs that wrote the slots of its KV, as found when it was given back.
    _found: dict[int, tuple[EpochSpan, ...]] = field(default_factory=dict)

    @property
    def first_epoch(self) -> int:
        """The oldest weight epoch that this record names."""
        return self.admissions[0].epoch

    def admit(self, admission: Admission, sampled: int) -> None:
        """The request holds no KV and is about to be prefilled: prompt and the `sampled` tokens again.

        The radix prefix it matched is claimed to be of the current epoch (docs/provenance.md, "What is claimed").
        """
        if sampled < self._segment_start:  # SGLang drops the tokens of a retracted request with input embeddings
            self._truncate(sampled)
        self._close_segment(admission.epoch, sampled)
        self._context.clear()
        self.admissions.append(admission)

    def publish(self, epoch: int, committed: int | None, sampled: int) -> None:
        """Weight epoch `epoch` ends. `committed` positions of KV are held; None when a retract has taken them."""
        self._close_segment(epoch, sampled)
        if committed is None:
            self._context.clear()
            return
        known = self._context[-1].end if self._context else 0
        if committed > known:
            self._context.append(EpochSpan(epoch, known, committed))

    def measure(self, admission: int, found: tuple[EpochSpan, ...]) -> None:
        """The KV of an admission, by the stamps of its slots."""
        self._found[admission] = found

    def kv_segments(self, epoch: int, sampled: int, label: Label, found_label: Label | None = None) -> list[KvSegment]:
        """Segments over output tokens 0 .. `sampled`, epochs named by `label`; `epoch` is the current one.

        `found_label` names the epochs that were measured. A segment is measured where every position of its context
        was; where that isn't what is claimed, it is the segment's `measured_context`.

        `sampled` may be less than what was sampled (a stop string, a token computed in vain): the rest is cut off.
        Equal neighbours are one segment.
        """
        segments = list(self.segments)
        if sampled > self._segment_start:
            segments.append(self._segment(epoch, sampled))
        named: list[KvSegment] = []
        for segment in segments:
            end = min(segment.end, sampled)
            if end <= segment.start:
                continue
            context = self._named_context(segment.context, self.prompt_length + end - 1, label)
            item = KvSegment(segment.start, end, label(segment.epoch), context)
            item = self._measured(segment, item, found_label or label)
            if named and _continues(named[-1], item, self.prompt_length):
                item = replace(item, start=named.pop().start)
            named.append(item)
        return named

    def prefills(self, label: Label) -> list[Prefill]:
        return [Prefill(a.epoch, a.order, label(a.epoch), a.cached, a.total) for a in self.admissions]

    def _close_segment(self, epoch: int, sampled: int) -> None:
        if sampled > self._segment_start:
            self.segments.append(self._segment(epoch, sampled))
            self._segment_start = sampled

    def _segment(self, epoch: int, sampled: int) -> EpochSegment:
        context = self._context_for(epoch, sampled)
        return EpochSegment(self._segment_start, sampled, epoch, context, len(self.admissions) - 1)

    def _measured(self, segment: EpochSegment, claim: KvSegment, label: Label) -> KvSegment:
        found, end = self._found.get(segment.admission, ()), self.prompt_length + claim.end - 1
        if not found or found[-1].end < end:
            return claim
        context = self._named_context(found, end, label)
        return replace(claim, measured=True, measured_context=() if context == claim.context else context)

    def _context_for(self, epoch: int, sampled: int) -> tuple[EpochSpan, ...]:
        known = self._context[-1].end if self._context else 0
        return (*self._context, EpochSpan(epoch, known, max(known, self.prompt_length + sampled - 1)))

    def _truncate(self, sampled: int) -> None:
        self.segments = [replace(s, end=min(s.end, sampled)) for s in self.segments if s.start < sampled]
        self._segment_start = sampled

    @staticmethod
    def _named_context(context: tuple[EpochSpan, ...], end: int, label: Label) -> tuple[Span, ...]:
        named: list[Span] = []
        for span in context:
            stop = min(span.end, end)
            if stop <= span.start:
                continue
            item = Span(label(span.epoch), span.start, stop)
            if named and named[-1].version == item.version:
                item = replace(item, start=named.pop().start)
            named.append(item)
        return tuple(named)


def _continues(left: KvSegment, right: KvSegment, prompt_length: int) -> bool:
    """Whether `right` was sampled by the same version from the same KV, grown: then both are one segment."""
    if left.version != right.version or left.measured != right.measured:
        return False
    if left.measured_context or right.measured_context:
        return False
    end = prompt_length + left.end - 1
    grown = [Span(s.version, s.start, min(s.end, end)) for s in right.context if s.start < end]
    return list(left.context) == grown
