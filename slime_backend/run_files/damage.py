"""What a reading of a run's files had to leave out: damaged lines and segments, named and counted.

A run's files are read after the disk or a process failed: a bad block, NULs after a power cut, a line that was edited
by hand. One damaged line costs that line. It is skipped, counted here with its file and line number, and the first one
of each file is logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

NAMED = 20  # of the damaged places of one reading; the others are counted only
_LOGGED: set[Path] = set()  # files whose first damaged place this process has logged


@dataclass(slots=True)
class Damage:
    """Counts what one reading left out. `places`: "rollouts.jsonl, line 17: not JSON", the first NAMED ones."""

    lines: int = 0  # or rows of Parquet files
    segments: int = 0  # of the ledger that can't be read at all, or are gone
    places: list[str] = field(default_factory=list)

    def add_line(self, path: Path, number: int, why: str, *, unit: str = "line") -> None:
        """`number` counts from 1."""
        self.lines += 1
        self._name(path, f"{path.name}, {unit} {number}: {why}")

    def add_segment(self, path: Path, why: str) -> None:
        self.segments += 1
        self._name(path, f"{path.name}: {why}")

    def merge(self, other: Damage) -> None:
        self.lines += other.lines
        self.segments += other.segments
        self.places += other.places[: NAMED - len(self.places)]

    def _name(self, path: Path, place: str) -> None:
        if len(self.places) < NAMED:
            self.places.append(place)
        if path not in _LOGGED:
            _LOGGED.add(path)
            log.warning("%s: %s; it is left out, as are further damaged ones of this file", path.parent, place)

    def __bool__(self) -> bool:
        return bool(self.lines or self.segments)

    def __str__(self) -> str:
        """One line: "2 damaged lines and 1 damaged segment left out (rollouts.jsonl, line 17: not JSON; ...)"."""
        counts = [f"{n} damaged {word}{'s' * (n != 1)}" for n, word in self._counts() if n]
        more = "; ..." if self.lines + self.segments > len(self.places) else ""
        return f"{' and '.join(counts)} left out ({'; '.join(self.places)}{more})"

    def _counts(self) -> tuple[tuple[int, str], ...]:
        return (self.lines, "line"), (self.segments, "segment")

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.lines, "segments": self.segments, "places": list(self.places)}
