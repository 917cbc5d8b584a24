"""How far recomputed log-probs are from recorded ones: a histogram of constant size, whatever the number of tokens.

An honest engine and a fault are decades apart, so the bins are equal steps of log10: ten to a decade. A quantile is the
upper edge of its bin (at most the largest value), so it is never given too small and at most 26 % too large. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from slime_backend.wire import KvSegment, Prefill

# Of the tokens of one KV segment, by where a fault would come from:
# own         its own version computed all the KV, at the first go
# recomputed  its own version computed all the KV again, after a retract
# carried     another version had computed some of the KV
SpanKind = Literal["own", "recomputed", "carried"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)

LOWEST, PER_DECADE, BINS = -8, 10, 100  # 1e-8 .. 1e2 nats; what is outside counts in the outermost bin
QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(slots=True)
class Differences:
    """|difference of log-prob| of many tokens, in nats. A value that isn't a number counts as infinite."""

    tokens: int = 0
    largest: float = 0.0
    total: float = 0.0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            value = math.inf if math.isnan(value) else value
            self.tokens += 1
            self.total += value
            self.largest = max(self.largest, value)
            self.bins[_bin(value)] += 1

    def quantile(self, share: float) -> float:
        """The difference that this share of the tokens doesn't exceed; 0 without tokens."""
        wanted, seen = math.ceil(share * self.tokens), 0
        for number, count in enumerate(self.bins):
            seen += count
            if count and seen >= wanted:
                return min(upper_edge(number), self.largest)
        return self.largest

    def to_json(self) -> dict[str, Any]:
        """`bins` from 1e-8 on; those above the last one with a token are left out."""
        used = max((i + 1 for i, count in enumerate(self.bins) if count), default=0)
        quantiles = {f"{share:g}": self.quantile(share) for share in QUANTILES}
        return {
            "tokens": self.tokens,
            "mean": self.total / max(1, self.tokens),
            "max": self.largest,
            "quantiles": quantiles,
            "bins": self.bins[:used],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Differences:
        bins = list(data["bins"])
        return cls(data["tokens"], data["max"], data["mean"] * data["tokens"], bins + [0] * (BINS - len(bins)))


def upper_edge(number: int) -> float:
    return float(10 ** (LOWEST + (number + 1) / PER_DECADE))


def span_kind(number: int, segments: Sequence[KvSegment], prefills: Sequence[Prefill]) -> SpanKind:
    """The kind of segment `number` of a rollout."""
    segment = segments[number]
    if any(span.version != segment.version for span in segment.context):
        return "carried"
    # A retract before the first token leaves one segment and two prefills.
    again = number > 0 or (len(prefills) > 1 and len(segments) == 1)
    return "recomputed" if again else "own"


def _bin(value: float) -> int:
    if value <= 10**LOWEST:
        return 0
    if value == math.inf:
        return BINS - 1
    return min(BINS - 1, max(0, math.ceil((math.log10(value) - LOWEST) * PER_DECADE) - 1))
