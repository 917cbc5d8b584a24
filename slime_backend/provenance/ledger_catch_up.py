"""Makes the ledger's index say what the segments hold, and keeps two processes from doing so at once."""

from __future__ import annotations

import fcntl
import itertools
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from slime_backend.provenance.ledger_index import Entry, LedgerIndex, index_path, remove_index
from slime_backend.provenance.segments import FOLDER, Segment, list_segments, parquet_module

BATCH = 2000  # rows per transaction
PAUSE_S = 0.05

Row = tuple[int, int | None, Entry]  # row, offset of its line if it is one, what is indexed of it


def open_index(run_dir: Path) -> tuple[LedgerIndex, list[str]]:
    """The index on disk, mended: (index, what was wrong with it). Only for who holds the lock."""
    was_there = index_path(run_dir).exists()
    notes: list[str] = []
    try:
        index = LedgerIndex(index_path(run_dir))
        added, notes = catch_up(index, list_segments(run_dir))
    except sqlite3.DatabaseError as error:
        remove_index(run_dir)
        index = LedgerIndex(index_path(run_dir))
        added, _ = catch_up(index, list_segments(run_dir))
        return index, [f"the index was damaged ({error}) and is rebuilt from {added} rollouts"]
    if added and not was_there:
        notes.append(f"the index was missing and is rebuilt from {added} rollouts")
    elif added and not notes:
        notes.append(f"the index was behind and has caught up with {added} rollouts")
    return index, notes


def lock_ledger(run_dir: Path, wait_s: float) -> TextIO | None:
    """The lock of a run's ledger, or None if somebody holds it for longer than `wait_s`. It ends with its holder."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "_lock").open("a")
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                return None
            time.sleep(PAUSE_S)


def is_written(run_dir: Path) -> bool:
    """Whether somebody holds the lock of the run's ledger: its writer or, for a moment, a reader that mends the index.

    A shared lock is tried for, so two who ask don't see each other; a writer that comes in this moment tries again.
    """
    try:
        with (run_dir / FOLDER / "_lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def catch_up(index: LedgerIndex, segments: Sequence[Segment]) -> tuple[int, list[str]]:
    """Make the index say what the segments hold: (rows added, what was wrong, one line each).

    A Parquet segment that was noted with this very size is believed; lines are checked at the last indexed one.
    """
    wrong: list[str] = []
    numbers = {s.number for s in segments if s.path.exists()}
    for gone in sorted(index.segments() - numbers):
        wrong.append(f"segment {gone} is no longer there; {index.forget(gone)} rollouts were taken out of the index")
    sealed = index.sealed()
    added = 0
    for segment in segments:
        if not segment.path.exists():
            continue
        if segment.kind == "parquet":
            size = segment.path.stat().st_size
            if segment.number in sealed and sealed[segment.number] == (size, index.rows(segment.number)):
                continue
            if segment.number in sealed:
                wrong.append(f"segment {segment.number} isn't the file that was indexed; it is indexed anew")
            index.forget(segment.number)
            rows = _add_all(index, segment.number, _parquet_rows(segment.path))
            index.seal(segment.number, size, rows)
            added += rows
        else:
            start, row = _indexed_until(index, segment)
            if row < index.rows(segment.number):
                wrong.append(f"segment {segment.number} isn't the file that was indexed; it is indexed anew")
                index.forget(segment.number)
            added += _add_all(index, segment.number, _lines_from(segment.path, start, row))
    return added, wrong


def is_current(index: LedgerIndex, segments: Sequence[Segment]) -> bool:
    """Whether every record of the segments is indexed, but for the one that may be under way."""
    sealed = index.sealed()
    for segment in segments:
        if not segment.path.exists():
            continue
        if segment.kind == "parquet":
            if sealed.get(segment.number, (0, 0))[0] != segment.path.stat().st_size:
                return False
        else:
            start, row = _indexed_until(index, segment)
            ahead = itertools.islice(_lines_from(segment.path, start, row), 2)
            if sum(1 for _ in ahead) > 1:
                return False
    return True


def _add_all(index: LedgerIndex, segment: int, rows: Iterator[Row]) -> int:
    total, batch = 0, []
    for item in rows:
        batch.append(item)
        if len(batch) == BATCH:
            index.add(segment, batch)
            total, batch = total + len(batch), []
    if batch:
        index.add(segment, batch)
    return total + len(batch)


def _indexed_until(index: LedgerIndex, segment: Segment) -> tuple[int, int]:
    """(offset, row) of the first line that isn't indexed; (0, 0) where the last indexed line isn't in the file."""
    rows = index.rows(segment.number)
    offset, receipt = (index.place(segment.number, rows - 1) if rows else None) or (None, "")
    if offset is None:
        return 0, 0
    with segment.path.open("rb") as file:
        file.seek(offset)
        line = file.readline()
    try:
        same = line.endswith(b"\n") and json.loads(line)["receipt"] == receipt
    except (ValueError, TypeError, KeyError):  # the offset points into the middle of something else
        same = False
    return (offset + len(line), rows) if same else (0, 0)


def _lines_from(path: Path, offset: int, row: int) -> Iterator[Row]:
    with path.open("rb") as file:
        file.seek(offset)
        while (line := file.readline()).endswith(b"\n"):
            yield row, offset, Entry.of(json.loads(line))
            offset, row = offset + len(line), row + 1


def _parquet_rows(path: Path) -> Iterator[Row]:
    for row, data in enumerate(parquet_module().read_rows(path, without_tokens=True)):
        yield row, None, Entry.of(data)
