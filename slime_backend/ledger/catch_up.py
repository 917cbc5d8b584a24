"""Brings the ledger's index up to what the segments hold. What is damaged there is counted and not indexed."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_backend.ledger.files import Segment, list_segments, missing_segments, one_line, parquet_module, sealed_path
from slime_backend.ledger.index import Entry, LedgerIndex, index_path, remove_index
from slime_backend.ledger.lock import is_written as is_written
from slime_backend.ledger.lock import lock_ledger as lock_ledger
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import parse_line, scan_lines

BATCH = 2000  # rows per transaction

Row = tuple[int, int | None, Entry]  # row, offset of its line if it is one, what is indexed of it


def open_index(run_dir: Path, damage: Damage | None = None) -> tuple[LedgerIndex, list[str]]:
    """The index on disk, mended: (index, what was wrong with it). Only for who holds the lock. `damage` takes what the
    segments have of it."""
    was_there = index_path(run_dir).exists()
    found = Damage()
    notes: list[str] = []
    try:
        index = LedgerIndex(index_path(run_dir))
        added, notes = catch_up(index, list_segments(run_dir), found)
    except sqlite3.DatabaseError as error:
        remove_index(run_dir)
        index = LedgerIndex(index_path(run_dir))
        found = Damage()
        added, _ = catch_up(index, list_segments(run_dir), found)
        notes = [f"the index was damaged ({error}) and is rebuilt from {added} rollouts"]
    else:
        if added and not was_there:
            notes.append(f"the index was missing and is rebuilt from {added} rollouts")
        elif added and not notes:
            notes.append(f"the index was behind and has caught up with {added} rollouts")
    if damage is not None:
        damage.merge(found)
    return index, notes


def catch_up(index: LedgerIndex, segments: Sequence[Segment], damage: Damage | None = None) -> tuple[int, list[str]]:
    """Bring the index up to what the segments hold: (rows added, what was wrong, one line each).

    A Parquet segment that was noted with this very size is believed; lines are read, each one.
    """
    wrong: list[str] = []
    found = Damage() if damage is None else damage
    numbers = {s.number for s in segments if s.path.exists()}
    for gone in sorted(index.segments() - numbers):
        wrong.append(f"segment {gone} is no longer there; {index.forget(gone)} rollouts were taken out of the index")
    for gone in missing_segments(segments):
        found.add_segment(sealed_path(segments[-1].path.parent, gone, "parquet"), "it is no longer there")
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
                wrong.append(f"segment {segment.number} isn't the file that was indexed; it is indexed again")
            index.forget(segment.number)
            before = len(found.places), found.lines, found.segments
            rows = _add_all(index, segment.number, _parquet_rows(segment.path, found))
            if before == (len(found.places), found.lines, found.segments):
                index.seal(segment.number, size, rows)
            added += rows
        else:
            rows, isnt = _index_lines(index, segment, found)
            wrong += [isnt] if isnt else []
            added += rows
    return added, wrong


def _index_lines(index: LedgerIndex, segment: Segment, damage: Damage) -> tuple[int, str]:
    """Index the lines of a segment that aren't indexed: (how many, what was wrong).

    Each line is compared with what the index has of it, since a disk may have failed in the middle of the file.
    """
    indexed = index.places(segment.number)
    unseen, new, stale = set(indexed), 0, False
    for row, offset, entry in _lines_from(segment.path, 0, 0, damage):
        place = indexed.get(row)
        new += place is None
        stale |= place is not None and place != (offset, entry.receipt)
        unseen.discard(row)
    wrong = ""
    if stale or unseen:
        index.forget(segment.number)
        indexed, wrong = {}, f"segment {segment.number} isn't the file that was indexed; it is indexed again"
    elif not new:
        return 0, ""
    # Read again instead of kept: a segment has many lines.
    lines = _lines_from(segment.path, 0, 0, Damage())
    return _add_all(index, segment.number, (line for line in lines if line[0] not in indexed)), wrong


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
    record, _ = parse_line(line) if line.endswith(b"\n") else (None, "")  # the offset may point into something else
    same = record is not None and record.get("receipt") == receipt
    return (offset + len(line), rows) if same else (0, 0)


def _lines_from(path: Path, offset: int, row: int, damage: Damage | None = None) -> Iterator[Row]:
    """Every undamaged line: its row is the number of lines before it."""
    found = Damage() if damage is None else damage
    with path.open("rb") as file:
        for line in scan_lines(file, path, offset, row):
            if line.damaged:
                found.add_line(path, line.number, line.damaged)
            elif line.record is not None:
                try:
                    RolloutRecord.from_json(line.record)
                except RecordError as error:
                    found.add_line(path, line.number, str(error))
                else:
                    yield line.number - 1, line.offset, Entry.of(line.record)


def _parquet_rows(path: Path, damage: Damage) -> Iterator[Row]:
    parquet = parquet_module()
    row = -1
    try:
        for row, data in enumerate(parquet.read_rows(path, without_tokens=True)):
            try:
                RolloutRecord.from_json({"prompt_ids": (), "output_ids": (), "logprobs": (), **data})
            except RecordError as error:
                damage.add_line(path, row + 1, str(error), unit="row")
            else:
                yield row, None, Entry.of(data)
    except parquet.UNREADABLE as error:
        damage.add_segment(path, f"unreadable from row {row + 2} on: {one_line(error)}")
