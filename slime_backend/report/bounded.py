"""Figures over any number of values in memory of a fixed size. Pure but for `ReceiptCounts`, which spills to the disk.

Thinned         some of many items, evenly spaced, in their order
Median          of few values exactly; of many, of a random sample
ReceiptCounts   lost and doubled receipts, exactly
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Generic, TypeVar

T = TypeVar("T")

MEDIAN_OF = (
    10_000  # values; of a random sample of so many, a median's place is within 1 % of the middle, 19 times of 20
)
PARTS = 64  # of the receipts, looked at one after the other
IN_MEMORY = 32 * 1024  # bytes of a part, before it goes to the disk
DIGEST = 12  # bytes: two of a million receipts are alike once in 1e17 runs


@dataclass(slots=True)
class Thinned(Generic[T]):
    """At most `room` of the items, every stride-th; the stride doubles where they would be more. The last is kept."""

    room: int
    items: list[T] = field(default_factory=list)
    seen: int = 0
    stride: int = 1
    _last: list[T] = field(default_factory=list)  # where it isn't one of the items

    def add(self, item: T) -> None:
        self._last = []
        if self.seen % self.stride:
            self._last = [item]
        else:
            if len(self.items) >= self.room:
                self.items = self.items[::2]
                self.stride *= 2
            if self.seen % self.stride:
                self._last = [item]
            else:
                self.items.append(item)
        self.seen += 1

    def all(self) -> list[T]:
        return [*self.items, *self._last]


class Median:
    """Of all values up to MEDIAN_OF; above, of a random sample of them (reservoir, Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.count = 0
        self._values: list[float] = []
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self.count += 1
        if len(self._values) < MEDIAN_OF:
            self._values.append(value)
        elif (place := self._random.randrange(self.count)) < MEDIAN_OF:
            self._values[place] = value

    @property
    def value(self) -> float | None:
        ordered = sorted(self._values)
        if not ordered:
            return None
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class ReceiptCounts:
    """Counts receipts that were submitted and never completed, and those that were completed twice.

    with ReceiptCounts() as counts:
        counts.submitted(receipt); counts.completed(receipt); ...
        counts.lost_and_doubled()

    A receipt's digest goes into one of PARTS parts by its first bits; a small run's parts stay in memory, a large one's
    lie in temporary files and are looked at one by one. Raises OSError where the disk has no room for 12 bytes each.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._sent = [self._part() for _ in range(PARTS)]
        self._back = [self._part() for _ in range(PARTS)]
        self.sent = self.back = self.not_usable = 0

    def __enter__(self) -> ReceiptCounts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def submitted(self, receipt: str) -> None:
        self.sent += 1
        self._add(self._sent, receipt)

    def completed(self, receipt: str) -> None:
        self.back += 1
        self._add(self._back, receipt)

    def unusable(self, receipt: str) -> None:
        """It came back, with an answer that is no rollout."""
        self.not_usable += 1
        self._add(self._back, receipt)

    def lost_and_doubled(self) -> tuple[int, int]:
        lost, different = 0, 0
        for sent, back in zip(self._sent, self._back, strict=True):
            found = set(_digests(back))
            different += len(found)
            lost += len(set(_digests(sent)) - found)
        return lost, self.back + self.not_usable - different

    def _part(self) -> IO[bytes]:
        return self._stack.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY))

    def _add(self, parts: list[IO[bytes]], receipt: str) -> None:
        digest = hashlib.blake2b(receipt.encode(), digest_size=DIGEST).digest()
        parts[digest[0] % PARTS].write(digest)


def _digests(part: IO[bytes]) -> Iterator[bytes]:
    part.seek(0)
    while digest := part.read(DIGEST):
        yield digest
