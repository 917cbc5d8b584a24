"""The files that a run's rollouts lie in, oldest first.

    rollouts/000000.parquet   a sealed segment
    rollouts/_000001.jsonl    sealed, not turned into Parquet yet (a kill came in between; the next writer does it)
    rollouts.jsonl            the active segment; its number is the next one

Whatever else is in `rollouts/` bears a leading underscore, which readers of Parquet directories pass over.

A segment keeps its number when it is sealed and when it changes its format, and its rows keep their order, so whoever
has noted (segment, row) never has to note it again. Most runs have the active segment only.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from slime_backend.provenance.errors import LedgerError
from slime_backend.provenance.jsonl import read_lines

ACTIVE = "rollouts.jsonl"
FOLDER = "rollouts"
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Segment:
    number: int
    path: Path
    kind: Literal["jsonl", "parquet"]
    sealed: bool


def sealed_path(run_dir: Path, number: int, kind: str) -> Path:
    return run_dir / FOLDER / (f"{number:06d}.parquet" if kind == "parquet" else f"_{number:06d}.jsonl")


def list_segments(run_dir: Path) -> list[Segment]:
    """All segments in order; the active one is last, whether its file is there yet or not."""
    found: dict[int, Segment] = {}
    # A Parquet file is complete, so it wins over the lines that it was made from.
    for kind, pattern in (("jsonl", "_[0-9]*.jsonl"), ("parquet", "[0-9]*.parquet")):
        for path in (run_dir / FOLDER).glob(pattern):
            number = path.stem.removeprefix("_")
            if number.isdigit():
                found[int(number)] = Segment(int(number), path, kind, True)  # type: ignore[arg-type]
    active = Segment(max(found, default=-1) + 1, run_dir / ACTIVE, "jsonl", False)
    return [*(found[number] for number in sorted(found)), active]


def read_rollouts(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every complete record of a run, oldest first, also while it is written to. A run without rollouts has none; a
    torn last line is left out.
    """
    yield from Tail(run_dir).new()


class Tail:
    """Reads a run that is being written to: each call of `new` goes on where the last one stopped.

    A segment may be sealed or turned into Parquet between the look for it and its opening, so each is looked for anew
    when its turn comes, and what was opened is made sure of. Its rows keep their order, its lines their offsets.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._number = self._rows = self._offset = 0  # segment; records and bytes of it that were read

    def new(self) -> Iterator[dict[str, Any]]:
        """The complete records behind those that were read, oldest first."""
        while True:
            segment = next(s for s in list_segments(self.run_dir) if s.number >= self._number)
            if segment.number != self._number:
                self._go_to(segment.number)
            if segment.kind == "parquet":
                for row in itertools.islice(parquet_module().read_rows(segment.path), self._rows, None):
                    self._rows += 1
                    yield row
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
                    file.seek(self._offset)
                    for row, size in read_lines(file, segment.path, self._rows):
                        self._rows, self._offset = self._rows + 1, self._offset + size
                        yield row
                    if not segment.sealed:
                        return
            self._go_to(segment.number + 1)

    def _go_to(self, number: int) -> None:
        self._number, self._rows, self._offset = number, 0, 0


def parquet_module() -> ModuleType:
    """`provenance.parquet`, imported where a segment is Parquet: small runs do without pyarrow.

    Raises LedgerError without it.
    """
    try:
        return importlib.import_module("slime_backend.provenance.parquet")
    except ModuleNotFoundError as error:
        raise LedgerError(f"older rollouts lie in Parquet files, and {error.name} is not installed") from error
