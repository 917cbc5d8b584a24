"""Looks up rollouts of a run, also while it is running: index first, then the one segment that holds the record."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_backend.ledger.catch_up import catch_up, is_current, lock_ledger, open_index
from slime_backend.ledger.files import Segment, list_segments, one_line, parquet_module, sealed_path
from slime_backend.ledger.index import LedgerIndex, Place, Query, index_path, remove_index
from slime_backend.provenance.errors import LedgerError, RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import parse_line

log = logging.getLogger(__name__)

TRIES, PAUSE_S = 10, 0.05  # for a segment that is sealed under the reader's hands


class LedgerReader:
    """Looks rollouts up. Made by `open_reader`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.notes: list[str] = []  # what was wrong with the index
        self.damage = Damage()  # what opening and looking up had to leave out
        self._rows: Any = None  # parquet.RowReader, imported where a segment is Parquet
        self._index = self._open_index()
        if any(segment.kind == "parquet" for segment in list_segments(run_dir)):
            with suppress(LedgerError):  # without pyarrow the lines can be asked all the same
                self._rows = parquet_module().RowReader()  # now, since loading pyarrow takes longer than any look

    def find(self, query: Query, limit: int | None = None) -> Iterator[RolloutRecord]:
        """Matching rollouts, oldest first. One whose line or segment was damaged since it was indexed is counted in
        `damage` and left out. Raises LedgerError for one that is nowhere.
        """
        for place in self._ask(lambda index: index.find(query, limit)):
            record = self._read(place)
            if record is not None:
                yield record

    def count(self, query: Query) -> int:
        found: int = self._ask(lambda index: index.count(query))
        return found

    def _ask(self, question: Callable[[LedgerIndex], Any]) -> Any:
        try:
            return question(self._index)
        except sqlite3.DatabaseError as error:
            self._note(f"the index is damaged ({error})")
            self._index.close()
            self._index = self._made_anew()
            return question(self._index)

    def _open_index(self) -> LedgerIndex:
        """On disk and mended where no writer is at work; as it is next to a writer; else made in memory."""
        try:
            lock = lock_ledger(self.run_dir, 0.0)
        except OSError as error:
            self._note(f"can't write next to the data ({error.strerror})")
            return self._in_memory()
        if lock is not None:
            with lock:
                return self._mended()
        for _ in range(TRIES):  # a segment that was converted just now isn't noted yet
            with suppress(sqlite3.Error, OSError):
                index = LedgerIndex(index_path(self.run_dir), read_only=True)
                if is_current(index, list_segments(self.run_dir)):
                    return index
                index.close()
            time.sleep(PAUSE_S)
        self._note("the writer's index is behind or can't be read")
        return self._in_memory()

    def _made_anew(self) -> LedgerIndex:
        """A new index instead of a damaged one: on disk where no writer is at work, else in memory."""
        lock = None
        with suppress(OSError):
            lock = lock_ledger(self.run_dir, 0.0)
        if lock is None:
            return self._in_memory()
        with lock:
            remove_index(self.run_dir)
            return self._mended()

    def _mended(self) -> LedgerIndex:
        """The index on disk. For who holds the lock."""
        self.damage = Damage()
        try:
            index, notes = open_index(self.run_dir, self.damage)
        except (sqlite3.Error, OSError) as error:  # a file system without locks, or without space
            self._note(f"no index can be kept on this disk ({error})")
            return self._in_memory()
        for note in notes:
            self._note(note)
        return index

    def _in_memory(self) -> LedgerIndex:
        index = LedgerIndex(None)
        self.damage = Damage()
        added, _ = catch_up(index, list_segments(self.run_dir), self.damage)
        self._note(f"{added} rollouts were indexed in memory, for this look only")
        return index

    def _read(self, place: Place) -> RolloutRecord | None:
        """One record; None where it is damaged. Its segment may be sealed or converted between the look into the
        index and this, so a fault counts only where the segment is still the same afterwards."""
        for _ in range(TRIES):
            segment = self._segment(place.segment)
            if segment is None:
                self.damage.add_segment(sealed_path(self.run_dir, place.segment, "parquet"), "it is no longer there")
                return None
            try:
                data = self._read_parquet(segment, place) if segment.kind == "parquet" else _read_line(segment, place)
                record = RolloutRecord.from_json(data)
                if record.receipt == place.receipt:
                    return record
                why = ""  # another rollout's
            except LedgerError:
                raise
            except FileNotFoundError:
                why = ""
            except Exception as error:  # whatever pyarrow, the disk or the checks of a record raise for damaged data
                why = str(error) if isinstance(error, RecordError) else one_line(error)
            if why and self._segment(place.segment) == segment:
                unit = "row" if segment.kind == "parquet" else "line"
                self.damage.add_line(segment.path, place.row + 1, why, unit=unit)
                return None
            time.sleep(PAUSE_S)
        raise LedgerError(
            f"{self.run_dir}: rollout {place.receipt} isn't where the index says, row {place.row} of segment "
            f"{place.segment}; ask again, or remove {index_path(self.run_dir)}, which is rebuilt"
        )

    def _segment(self, number: int) -> Segment | None:
        return next((s for s in list_segments(self.run_dir) if s.number == number), None)

    def _read_parquet(self, segment: Segment, place: Place) -> dict[str, Any]:
        if self._rows is None:
            self._rows = parquet_module().RowReader()
        found: dict[str, Any] = self._rows.read(segment.path, place.row)
        return found

    def _note(self, text: str) -> None:
        log.warning("%s: %s", self.run_dir, text)
        self.notes.append(text)

    def close(self) -> None:
        self._index.close()
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_reader(run_dir: Path) -> LedgerReader:
    """Raises LedgerError where nothing was recorded."""
    if not any(segment.path.exists() for segment in list_segments(run_dir)):
        raise LedgerError(
            f"{run_dir} has no {RunDir(run_dir).rollouts.name}; was the run started with another directory?"
        )
    return LedgerReader(run_dir)


def _read_line(segment: Segment, place: Place) -> dict[str, Any]:
    """The record at the place's offset; RecordError where there is none, FileNotFoundError without the file."""
    if place.offset is None:
        raise RecordError("only its row is known")
    with segment.path.open("rb") as file:
        file.seek(place.offset)
        record, why = parse_line(file.readline())
    if record is None:
        raise RecordError(why or "it is blank")
    return record
