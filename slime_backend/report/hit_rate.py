"""Prefix hit rate along a run, gathered in one pass over the ledger.

A prefill bears no time, but the weight version it was admitted under and its order since that version's publication.
So the course of the hit rate is drawn over publications: version k spans k .. k+1, its admissions in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BIN = 4  # admissions; the first of a version is alone in its bin, since nothing can be cached for it
POINTS_PER_VERSION = 24
POINTS_PER_ENGINE = 2000
VERSIONS = 2000  # with points; of a longer run every second version is let go where they would be more


@dataclass(frozen=True, slots=True)
class Point:
    x: float  # version's place, plus the share of its admissions that came before
    rate: float  # 0..1
    version: str
    first: int  # order of the first and the last admission of the point
    last: int
    tokens: int


@dataclass(slots=True)
class HitRate:
    """(engine, version) -> bin -> [tokens found in the cache, tokens of prompts]."""

    bins: dict[tuple[str, str], dict[int, list[int]]] = field(default_factory=dict)
    versions: dict[str, None] = field(default_factory=dict)  # a set, in the order of first admission in the ledger
    drawn: dict[str, None] = field(default_factory=dict)  # of these, the versions with bins
    _every: int = 1

    def add(self, record: Mapping[str, Any]) -> None:
        """One stored rollout."""
        for prefill in record.get("prefills") or ():
            version = str(prefill["version"])
            if version not in self.versions:
                self._meet(version)
            if version not in self.drawn:
                continue
            order = int(prefill["order"])
            number = 0 if order == 0 else 1 + (order - 1) // BIN
            found = self.bins.setdefault((str(record.get("engine", "?")), version), defaultdict(lambda: [0, 0]))
            found[number][0] += int(prefill["cached"])
            found[number][1] += int(prefill["total"])

    def _meet(self, version: str) -> None:
        number = len(self.versions)
        self.versions[version] = None
        if number % self._every:
            return
        self.drawn[version] = None
        if len(self.drawn) > VERSIONS:
            self._every *= 2
            self.drawn = dict.fromkeys(list(self.drawn)[::2])
            self.bins = {key: bins for key, bins in self.bins.items() if key[1] in self.drawn}

    @property
    def engines(self) -> list[str]:
        return sorted({engine for engine, _ in self.bins})

    def course(self, engine: str, versions: Sequence[str]) -> list[Point]:
        """The engine's points in order, over `versions` in the order of publication; few enough to be drawn."""
        room = max(2, min(POINTS_PER_VERSION, POINTS_PER_ENGINE // max(1, len(versions))))
        points = []
        for place, version in enumerate(versions):
            found = self.bins.get((engine, version))
            if found:
                points += _merged(place, version, found, room)
        return points


def _merged(place: int, version: str, bins: Mapping[int, Sequence[int]], room: int) -> list[Point]:
    """Bin 0 for itself, the others in at most `room` - 1 runs of neighbours."""
    last_order = BIN * max(bins)
    later = sorted(number for number in bins if number > 0)
    size = max(1, -(-len(later) // (room - 1)))
    runs = [later[i : i + size] for i in range(0, len(later), size)]
    if 0 in bins:
        runs.insert(0, [0])
    points = []
    for run in runs:
        cached, total = (sum(bins[number][i] for number in run) for i in (0, 1))
        first = 0 if run[0] == 0 else BIN * (run[0] - 1) + 1
        last = BIN * run[-1]
        middle = (first + last) / 2 / (last_order + 1)
        points.append(Point(place + middle, cached / max(1, total), version, first, last, total))
    return points
