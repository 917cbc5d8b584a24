"""How many rollouts an audit must check to find contamination, if there is any.

Of M recorded rollouts K are contaminated; n are checked, drawn at random without putting back. The chance to see none
of the K is C(M - K, n) / C(M, n), the hypergeometric distribution at 0; without a known M, (1 - 1/N)^n for one in N.
(W. Feller, An Introduction to Probability Theory and Its Applications, vol. 1, II.6.)

The audit first takes rollouts that lived through a publication, then draws at random from the rest (`Sample`), so
the chance here is that of the draw from the rest: contamination that the first part hits only makes it better.

It is the chance to check a contaminated rollout. That its log-probs then differ by more than the tolerance is another
matter: docs/audit.md. Pure: no I/O, no torch.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

PROBABILITY = 0.99


def chance_to_find(population: int, contaminated: int, checked: int) -> float:
    """Probability that `checked` of `population` rollouts, drawn at random, have one of the `contaminated` among them.

    Raises ValueError unless 0 <= contaminated, checked <= population.
    """
    if not (0 <= contaminated <= population and 0 <= checked <= population):
        raise ValueError(f"can't draw {checked} of {population} with {contaminated} contaminated")
    if contaminated == 0 or checked == 0:
        return 0.0
    if checked > population - contaminated:
        return 1.0
    few, many = sorted((contaminated, checked))  # symmetric in the two
    missed = math.fsum(math.log1p(-many / (population - i)) for i in range(few))
    return -math.expm1(missed)


def sample_size(one_in: int, probability: float = PROBABILITY, population: int | None = None) -> int:
    """Rollouts to draw so that, if one in `one_in` is contaminated, one of these is drawn with this probability.

    `population`: how many there are; at least one of them is taken to be contaminated. None: without end.
    Raises ValueError for a probability outside 0..1 (both excluded) or counts under 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability} must lie between 0 and 1; certainty means checking all")
    if one_in < 1 or (population is not None and population < 1):
        raise ValueError("one_in and population must be at least 1")
    if population is None:
        if one_in == 1:
            return 1
        return math.ceil(math.log1p(-probability) / math.log1p(-1 / one_in))
    contaminated = math.ceil(population / one_in)
    return _smallest(population, lambda n: chance_to_find(population, contaminated, n) >= probability)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit of a run must check. `crossing` rollouts lived through a publication and are taken first."""

    recorded: int
    crossing: int
    probability: float = PROBABILITY

    def chance(self, contaminated: int, checked: int) -> float:
        """The least chance that `audit --rollouts checked` checks one of `contaminated` rollouts, wherever they are."""
        first = min(self.crossing, checked // 2)
        rest, drawn = self.recorded - first, min(checked, self.recorded) - first
        return chance_to_find(rest, min(contaminated, rest), drawn)

    def rollouts(self, one_in: int) -> int:
        """The smallest `--rollouts` that finds one contaminated in `one_in` with `probability`; larger ones do too."""
        contaminated = math.ceil(self.recorded / one_in)
        return _smallest(self.recorded, lambda n: self.chance(contaminated, n) >= self.probability)

    def finds_one_in(self, checked: int) -> int:
        """The rarest contamination, as one in so many, that `checked` rollouts find with `probability`; 0: none."""
        if not self.recorded or self.chance(self.recorded, checked) < self.probability:
            return 0
        contaminated = _smallest(self.recorded, lambda k: self.chance(k, checked) >= self.probability)
        # The largest m for which one in m of the recorded, rounded up, are that many.
        return self.recorded if contaminated == 1 else (self.recorded - 1) // (contaminated - 1)


class Sample:
    """Which of the rollouts seen so far an audit of `count` checks: half the places for those that lived through a
    publication, where a fault would show; the rest by lot.

    A lot is a hash of the receipt, and the smallest lots win. So the sample of a run that still grows can be checked
    while it grows, whatever its final size: what isn't in the sample when it comes never is later, and what remains in
    it at the end is a random sample of the whole. About count * (1 + ln(N / count)) of N rollouts are let in on the
    way. Holds `count` receipts at most. `count` None: every rollout.
    """

    def __init__(self, count: int | None, seed: int = 0) -> None:
        self.count, self.seed = count, seed
        # (-lot, receipt): the first of a heap is the next to go
        self._first: list[tuple[int, str]] = []
        self._rest: list[tuple[int, str]] = []

    def offer(self, receipt: str, crossing: bool, suspect: bool = False) -> bool:
        """Whether this rollout is in the sample of those seen so far, itself included. `suspect`: it wins every lot."""
        if self.count is None:
            return True
        loser: str | None = receipt
        if crossing or suspect:
            lot = 0 if suspect else self._lot("first", receipt)
            loser = _push(self._first, (-lot, receipt), self.count // 2)
        if loser is not None:  # it draws again: who lost the first time is no worse off among the rest
            heapq.heappush(self._rest, (-self._lot("rest", loser), loser))
        out = heapq.heappop(self._rest)[1] if len(self._rest) > self.count - len(self._first) else None
        return out != receipt

    def holds(self) -> set[str]:
        """Receipts of the sample as it stands; none where every rollout is in it."""
        return {receipt for _, receipt in (*self._first, *self._rest)}

    def _lot(self, draw: str, receipt: str) -> int:
        text = f"{self.seed}/{draw}/{receipt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _push(heap: list[tuple[int, str]], item: tuple[int, str], size: int) -> str | None:
    """Put `item` in; the receipt that falls out where the heap is full."""
    if len(heap) < size:
        heapq.heappush(heap, item)
        return None
    return (heapq.heappushpop(heap, item) if size else item)[1]


def _smallest(largest: int, enough: Callable[[int], bool]) -> int:
    """The smallest n in 1..largest that is enough; `enough` stays true once it is, and is at `largest`."""
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
