"""The files that a run's rollouts lie in, oldest first.

    rollouts/000000.parquet   a sealed segment
    rollouts/_000001.jsonl    sealed, not turned into Parquet yet (a kill came in between; the next writer does it)
    rollouts.jsonl            the active segment; its number is the next one

Whatever else is in `rollouts/` begins with `_` or `.`, which readers of Parquet directories pass over.

A segment keeps its number when it is sealed and when it changes its format, and its rows keep their order, so whoever
has noted (segment, row) never has to note it again. Most runs have the active segment only.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from slime_backend.provenance.errors import LedgerError, RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.directory import SegmentKind
from slime_backend.run_files.jsonl import scan_lines


@dataclass(frozen=True, slots=True)
class Segment:
    number: int
    path: Path
    kind: SegmentKind
    sealed: bool


def sealed_path(run_dir: Path, number: int, kind: SegmentKind) -> Path:
    return RunDir(run_dir).sealed_rollouts(number, kind)


def list_segments(run_dir: Path) -> list[Segment]:
    """All segments in order; the active one is last, whether its file is there yet or not."""
    found: dict[int, Segment] = {}
    # A Parquet file is complete, so it wins over the lines that it was made from.
    kinds: tuple[SegmentKind, ...] = ("jsonl", "parquet")
    for kind in kinds:
        for number, path in RunDir(run_dir).list_sealed_rollouts(kind):
            found[number] = Segment(number, path, kind, True)
    active = Segment(max(found, default=-1) + 1, RunDir(run_dir).rollouts, "jsonl", False)
    return [*(found[number] for number in sorted(found)), active]


def missing_segments(segments: Sequence[Segment]) -> list[int]:
    """Numbers of sealed segments that are gone: a segment keeps its number for ever, so there are no gaps."""
    there = {segment.number for segment in segments}
    return [number for number in range(segments[-1].number) if number not in there]


def read_rollouts(run_dir: Path, damage: Damage | None = None) -> Iterator[dict[str, Any]]:
    """Every complete record of a run as it is stored, oldest first, also while it is written to. A run without rollouts
    has none; a torn last line is left out, and what is damaged is skipped and counted in `damage`.
    """
    for row, _ in Tail(run_dir, damage).pairs():
        yield row


def read_records(run_dir: Path, damage: Damage | None = None) -> Iterator[RolloutRecord]:
    """As `read_rollouts`, as records."""
    for _, record in Tail(run_dir, damage).pairs():
        yield record


class Tail:
    """Reads a run that is being written to: each call goes on where the last one stopped.

    A segment may be sealed or turned into Parquet between the look for it and its opening, so each is looked for again
    when its turn comes, and what was opened is made sure of. Its rows keep their order, its lines their offsets; one
    with a damaged line is never turned into Parquet, so a row is the line of the same number.
    """

    def __init__(self, run_dir: Path, damage: Damage | None = None) -> None:
        self.run_dir = run_dir
        self.damage = Damage() if damage is None else damage
        self._number = self._rows = self._offset = 0  # segment; lines or rows, and bytes of it that were read
        self._left = (0, 0, 0)  # the same of the segment before, where it was left

    def new(self) -> Iterator[dict[str, Any]]:
        """The complete records behind those that were read, oldest first, as they are stored."""
        for row, _ in self.pairs():
            yield row

    def new_records(self) -> Iterator[RolloutRecord]:
        """As `new`, as records."""
        for _, record in self.pairs():
            yield record

    def pairs(self) -> Iterator[tuple[dict[str, Any], RolloutRecord]]:
        """As `new`, each with its record."""
        while True:
            segments = list_segments(self.run_dir)
            if segments[-1].number < self._number:  # a rotation was taken back: the disk had no room for it
                self._number, self._rows, self._offset = self._left
            segment = next((s for s in segments if s.number >= self._number), segments[-1])
            if segment.number != self._number:
                for gone in range(self._number, segment.number):
                    self.damage.add_segment(sealed_path(self.run_dir, gone, "parquet"), "it is no longer there")
                self._go_to(segment.number)
            if segment.kind == "parquet":
                yield from self._parquet(segment)
            else:
                try:
                    file = segment.path.open("rb")
                except FileNotFoundError:
                    if segment == list_segments(self.run_dir)[-1]:
                        return  # nothing written yet
                    continue
                with file:
                    if not segment.sealed and list_segments(self.run_dir)[-1].number != segment.number:
                        continue  # what was opened may be the one after
                    yield from self._lines(file, segment)
                    if not segment.sealed:
                        return
            self._left = (self._number, self._rows, self._offset)
            self._go_to(segment.number + 1)

    def _lines(self, file: BinaryIO, segment: Segment) -> Iterator[tuple[dict[str, Any], RolloutRecord]]:
        for line in scan_lines(file, segment.path, self._offset, self._rows):
            self._rows, self._offset = line.number, line.offset + line.size
            if line.damaged:
                self.damage.add_line(segment.path, line.number, line.damaged)
            elif line.record is not None:
                yield from self._checked(line.record, segment, "line")

    def _parquet(self, segment: Segment) -> Iterator[tuple[dict[str, Any], RolloutRecord]]:
        parquet = parquet_module()
        try:
            for row in itertools.islice(parquet.read_rows(segment.path), self._rows, None):
                self._rows += 1
                yield from self._checked(row, segment, "row")
        except parquet.UNREADABLE as error:
            self.damage.add_segment(segment.path, f"unreadable from row {self._rows + 1} on: {one_line(error)}")

    def _checked(
        self, row: dict[str, Any], segment: Segment, unit: str
    ) -> Iterator[tuple[dict[str, Any], RolloutRecord]]:
        try:
            record = RolloutRecord.from_json(row)
        except RecordError as error:
            self.damage.add_line(segment.path, self._rows, str(error), unit=unit)
        else:
            yield row, record

    def _go_to(self, number: int) -> None:
        self._number, self._rows, self._offset = number, 0, 0


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def parquet_module() -> ModuleType:
    """`provenance.parquet`, imported where a segment is Parquet: small runs do without pyarrow.

    Raises LedgerError without it.
    """
    try:
        return importlib.import_module("slime_backend.ledger.parquet")
    except ModuleNotFoundError as error:
        raise LedgerError(f"older rollouts lie in Parquet files, and {error.name} is not installed") from error
