"""What would explain a rollout that doesn't hold: other claims are scored, and the one that fits names the fault.

    wrong label                 another version did all that this one is claimed to have done
    stale prefix                the prompt tokens found in the radix cache were another version's, or of two others
    carried, not recomputed     KV was kept across a publication; the record says that it was computed again
    recomputed, not carried     the other way round
    missed tensor               the version before did one tensor's part
    loaded in part              the version before did the part of all tensors from one on

The first four are tried over the whole rollout, with the nearest versions on disk. The last two take a forward pass a
tensor, so they are tried only where those don't fit, no more for a version where they didn't fit either, MIXES times
in all. Nothing fits: "unexplained".
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slime_backend.audit.scorer import Mix, Scorer, WeightsGoneError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Span

Fault = Literal[
    "wrong label",
    "stale prefix",
    "carried, not recomputed",
    "recomputed, not carried",
    "missed tensor",
    "loaded in part",
    "unexplained",
]
MIXES = 2000
ENDS = 3  # of cache entries, the most frequent ones
NEAREST = 4  # versions to try besides the claimed one
FITS = 0.1  # of the tolerance: such a fit ends the search

Segments = tuple[KvSegment, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Another claim for the same tokens."""

    fault: Fault
    text: str
    segments: Segments
    mix: Mix | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    fault: Fault
    text: str


class Diagnostician:
    """Remembers the mixes of weights that it found: an engine that misses a tensor misses it in every rollout."""

    def __init__(self, scorer: Scorer, tolerance: float) -> None:
        self.scorer, self.tolerance = scorer, tolerance
        self._mixes: dict[Mix, Hypothesis] = {}
        self._not_mixed: set[str] = set()
        self._left = MIXES
        self._cached: Counter[int] = Counter()

    def note(self, record: RolloutRecord) -> None:
        """Where cache entries of this run end: those who match more may have matched entries of several versions."""
        self._cached.update(p.cached for p in record.prefills if p.cached)

    def ends(self) -> list[int]:
        """The most frequent of these."""
        return [length for length, _ in self._cached.most_common(ENDS)]

    def explain(self, record: RolloutRecord) -> Diagnosis:
        """For a record that is consistent in itself, of versions on disk, whose log-probs don't hold."""
        cheap = itertools.chain(self._seen_mixes(record), claims(record, self.scorer, self.ends()))
        best, error = self._best(record, cheap)
        if error > FITS * self.tolerance:
            costly, costly_error = self._best(record, self._new_mixes(record))
            if costly_error < error:
                best, error = costly, costly_error
        if best is None:
            self._not_mixed |= set(_versions(record))
            return Diagnosis("unexplained", "no version on disk explains it, nor two of them mixed tensor by tensor")
        if best.mix is not None:
            self._mixes[best.mix] = best
        return Diagnosis(best.fault, f"{best.fault}: {best.text} (to {error:.1g})")

    def _seen_mixes(self, record: RolloutRecord) -> Iterator[Hypothesis]:
        for mix, found in self._mixes.items():
            if mix.version in _versions(record):
                yield replace(found, segments=record.segments)

    def _new_mixes(self, record: RolloutRecord) -> Iterator[Hypothesis]:
        for hypothesis in mixes(record, self.scorer):
            if self._left and hypothesis.mix and hypothesis.mix.version not in self._not_mixed:
                self._left -= 1
                yield hypothesis

    def _best(self, record: RolloutRecord, hypotheses: Iterable[Hypothesis]) -> tuple[Hypothesis | None, float]:
        """The hypothesis that fits best, and how well; the first that fits well ends the search."""
        best, least = None, float("inf")
        for hypothesis in hypotheses:
            error = self._error(record, hypothesis)
            if error < least:
                best, least = hypothesis, error
            if error <= FITS * self.tolerance:
                break
        return best, least

    def _error(self, record: RolloutRecord, hypothesis: Hypothesis) -> float:
        """Largest |difference of log-prob|; infinite as soon as a segment's is over the tolerance."""
        error = 0.0
        for segment in hypothesis.segments:
            try:
                scored = self.scorer.score(record, segment, hypothesis.mix)
            except WeightsGoneError:
                return float("inf")
            claimed = record.logprobs[segment.start : segment.end]
            diffs = [abs(a - b) for a, b in zip(scored, claimed, strict=True)]
            if not all(diff <= self.tolerance for diff in diffs):  # NaN isn't
                return float("inf")
            error = max(error, *diffs)
        return error


def claims(
    record: RolloutRecord, scorer: Scorer, ends: Sequence[int] = (), near: int = NEAREST
) -> Iterator[Hypothesis]:
    """Other versions, another cached prefix, KV kept or computed again: same weights on disk, other spans. `near`: how
    many other versions are tried in the place of each."""
    known = scorer.versions()
    for claimed in _versions(record):
        for other in nearest(claimed, known, near):
            text = f"{other} explains what it calls {claimed}"
            yield Hypothesis("wrong label", text, tuple(_renamed(s, claimed, other) for s in record.segments))
    for version, cached in dict.fromkeys((p.version, p.cached) for p in record.prefills if p.cached):
        for prefix in prefixes(version, cached, ends, known, near):
            who = " and ".join(f"{span.version} ({span.start}..{span.end})" for span in prefix)
            text = f"the {cached} cached tokens that it calls {version}'s had been computed by {who}"
            segments = tuple(_with_prefix(s, version, prefix) for s in record.segments)
            yield Hypothesis("stale prefix", text, segments)
    kept, recomputed = as_carried(record.segments), tuple(as_recomputed(s) for s in record.segments)
    if kept != record.segments:
        text = f"the KV of {record.segments[0].version} was kept across the publication"
        yield Hypothesis("carried, not recomputed", text, kept)
    if recomputed != record.segments:
        yield Hypothesis("recomputed, not carried", "each version computed all the KV that it sampled from", recomputed)


def prefixes(
    version: str, cached: int, ends: Sequence[int], known: Sequence[str], near: int = NEAREST
) -> Iterator[tuple[Span, ...]]:
    """Who else may have computed `cached` tokens claimed to be `version`'s: one other version; or one up to where
    an entry ends, and behind it a second, or `version` itself."""
    others = nearest(version, known, near)
    for first in others:
        yield (Span(first, 0, cached),)
    for end in (e for e in ends if e < cached):
        for first in others:
            for second in (version, *others):
                if second != first:
                    yield (Span(first, 0, end), Span(second, end, cached))


def mixes(record: RolloutRecord, scorer: Scorer) -> Iterator[Hypothesis]:
    """The claimed version with one tensor, or all from one on, of the version before it."""
    known = scorer.versions()
    for claimed in _versions(record):
        if claimed not in known or known.index(claimed) == 0:
            continue
        before = known[known.index(claimed) - 1]
        names = scorer.differing_tensors(claimed, before)
        for name in names:
            text = f"{claimed} with {name} of {before} explains it"
            yield Hypothesis("missed tensor", text, record.segments, Mix(claimed, before, frozenset([name])))
        for order in (names, sorted(names)):  # of the model, of a checkpoint file
            for count in range(1, len(order) - 1):
                text = f"{claimed} with {before}'s tensors from {order[count]} on explains it ({count} were loaded)"
                yield Hypothesis(
                    "loaded in part", text, record.segments, Mix(claimed, before, frozenset(order[count:]))
                )


def nearest(version: str, known: Sequence[str], count: int = NEAREST) -> list[str]:
    """Other versions by their distance in the order of publication, older first; and the first of all, of which a
    prompt that all share may have stayed."""
    place = known.index(version) if version in known else len(known)
    others = sorted((i for i in range(len(known)) if i != place), key=lambda i: (abs(i - place), i))
    return [known[i] for i in dict.fromkeys([*others[:count], *([0] if place else [])])]


def _versions(record: RolloutRecord) -> list[str]:
    """Every version that the record names, the latest first: the fault is likelier there."""
    named = [v for s in record.segments for v in (*(c.version for c in s.context), s.version)]
    return list(dict.fromkeys(reversed(named)))


def _renamed(segment: KvSegment, claimed: str, other: str) -> KvSegment:
    def name(version: str) -> str:
        return other if version == claimed else version

    context = tuple(Span(name(c.version), c.start, c.end) for c in segment.context)
    return KvSegment(segment.start, segment.end, name(segment.version), _merged(context))


def _with_prefix(segment: KvSegment, version: str, prefix: Sequence[Span]) -> KvSegment:
    """`prefix` on the first positions, where they are claimed to be `version`'s."""
    if segment.context[0].version != version:
        return segment
    length = prefix[-1].end
    rest = tuple(Span(c.version, max(c.start, length), c.end) for c in segment.context if c.end > length)
    return replace(segment, context=_merged((*prefix, *rest)))


def as_carried(segments: Segments) -> Segments:
    """As if each publication had kept all KV: a segment's context is the one before it, continued."""
    kept: list[KvSegment] = []
    for segment in segments:
        context = segment.context
        if kept:
            before, end = kept[-1].context, context[-1].end
            context = _merged((*before, Span(segment.version, before[-1].end, end)))
        kept.append(replace(segment, context=context))
    return tuple(kept)


def as_recomputed(segment: KvSegment) -> KvSegment:
    return replace(segment, context=(Span(segment.version, 0, segment.context[-1].end),))


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return tuple(merged)
