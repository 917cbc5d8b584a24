"""The class of a rollout: what one must know before taking it for the sample of one model.

Four traits can be read off the spans, and several may hold at once; the class is the strongest of them.

    pure        one version sampled every token and computed all the KV that they were sampled from, once
    recomputed  retracted: the KV was taken away and computed again. Every token was still sampled by one version
                from its own KV, so each log-prob is that version's, only computed twice
    mixed       several versions sampled it, each from KV of its own: each token is one model's sample, the whole isn't
    carried     some token was sampled from KV that another version had computed: its log-prob is no single model's

Precedence: carried > mixed > recomputed > pure. Pure functions of the wire contract's spans; no I/O.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from slime_backend.wire import KvSegment, Prefill, Span

RolloutClass = Literal["pure", "recomputed", "mixed", "carried"]
CLASSES: tuple[RolloutClass, ...] = get_args(RolloutClass)  # weakest first


def is_mixed(spans: Sequence[Span]) -> bool:
    """Sampled by more than one version."""
    return len({span.version for span in spans}) > 1


def is_carried(segments: Sequence[KvSegment]) -> bool:
    """Some token was sampled from KV that another version than its own had computed."""
    return any(span.version != segment.version for segment in segments for span in segment.context)


def is_recomputed(segments: Sequence[KvSegment], prefills: Sequence[Prefill]) -> bool:
    """Its KV was taken away and computed again.

    Prefills show it by their number. Spans alone show it too, where the versions differ: a later segment names another
    version for a position that an earlier one already had KV of.
    """
    if len(prefills) > 1:
        return True
    for earlier, later in itertools.pairwise(segments):
        end = earlier.context[-1].end if earlier.context else 0
        kept = tuple(Span(s.version, s.start, min(s.end, end)) for s in later.context if s.start < end)
        if kept != earlier.context:
            return True
    return False


def traits(
    spans: Sequence[Span], segments: Sequence[KvSegment], prefills: Sequence[Prefill]
) -> tuple[RolloutClass, ...]:
    """Every trait that holds, weakest first; ("pure",) where none of the others does."""
    holds = {
        "recomputed": is_recomputed(segments, prefills),
        "mixed": is_mixed(spans),
        "carried": is_carried(segments),
    }
    return tuple(name for name in CLASSES if holds.get(name)) or ("pure",)


def classify(spans: Sequence[Span], segments: Sequence[KvSegment], prefills: Sequence[Prefill]) -> RolloutClass:
    """The strongest trait."""
    return traits(spans, segments, prefills)[-1]


def count_classes(classes: Iterable[RolloutClass]) -> dict[str, int]:
    """Class -> how many, with a 0 for each that doesn't occur; the counts add up to the number of rollouts."""
    found = Counter(classes)
    return {name: found[name] for name in CLASSES}
