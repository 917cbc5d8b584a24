"""Looks up rollouts of a run, also while it is running: index first, then the one segment that holds the record."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_backend.provenance.errors import LedgerError
from slime_backend.provenance.ledger_catch_up import catch_up, is_current, lock_ledger, open_index
from slime_backend.provenance.ledger_index import LedgerIndex, Place, Query, index_path, remove_index
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.segments import ACTIVE, list_segments, parquet_module, sealed_path

log = logging.getLogger(__name__)

TRIES, PAUSE_S = 10, 0.05  # for a segment that is sealed under the reader's hands


class LedgerReader:
    """Looks rollouts up. Made by `open_reader`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.notes: list[str] = []  # what was wrong with the index
        self._rows: Any = None  # parquet.RowReader, imported where a segment is Parquet
        self._index = self._open_index()
        if any(segment.kind == "parquet" for segment in list_segments(run_dir)):
            with suppress(LedgerError):  # without pyarrow the lines can be asked all the same
                self._rows = parquet_module().RowReader()  # now, since loading pyarrow takes longer than any look

    def find(self, query: Query, limit: int | None = None) -> Iterator[RolloutRecord]:
        """Matching rollouts, oldest first."""
        for place in self._ask(lambda index: index.find(query, limit)):
            yield RolloutRecord.from_json(self._read(place))

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
        """On disk and mended where no writer is at work; as it is beside a writer; else made in memory."""
        try:
            lock = lock_ledger(self.run_dir, 0.0)
        except OSError as error:
            self._note(f"can't write beside the data ({error.strerror})")
            return self._in_memory()
        if lock is not None:
            with lock:
                index, notes = open_index(self.run_dir)
            for note in notes:
                self._note(note)
            return index
        for _ in range(TRIES):  # a segment that was turned over just now isn't noted yet
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
            index, notes = open_index(self.run_dir)
        for note in notes:
            self._note(note)
        return index

    def _in_memory(self) -> LedgerIndex:
        index = LedgerIndex(None)
        added, _ = catch_up(index, list_segments(self.run_dir))
        self._note(f"{added} rollouts were indexed in memory, for this look only")
        return index

    def _read(self, place: Place) -> dict[str, Any]:
        """One record. A segment may be sealed or turned over between the look into the index and this."""
        for _ in range(TRIES):
            for read in (self._read_parquet, self._read_sealed, self._read_active):
                with suppress(FileNotFoundError, ValueError, IndexError):
                    record: dict[str, Any] = read(place)
                    if record["receipt"] == place.receipt:
                        return record
            time.sleep(PAUSE_S)
        raise LedgerError(
            f"{self.run_dir}: rollout {place.receipt} isn't where the index says; ask again, "
            f"or remove {index_path(self.run_dir)}, which is rebuilt"
        )

    def _read_parquet(self, place: Place) -> dict[str, Any]:
        path = sealed_path(self.run_dir, place.segment, "parquet")
        if not path.exists():
            raise FileNotFoundError(path)
        if self._rows is None:
            self._rows = parquet_module().RowReader()
        found: dict[str, Any] = self._rows.read(path, place.row)
        return found

    def _read_sealed(self, place: Place) -> dict[str, Any]:
        return _read_line(sealed_path(self.run_dir, place.segment, "jsonl"), place.offset)

    def _read_active(self, place: Place) -> dict[str, Any]:
        return _read_line(self.run_dir / ACTIVE, place.offset)

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
        raise LedgerError(f"{run_dir} has no {ACTIVE}; was the run started with another directory?")
    return LedgerReader(run_dir)


def _read_line(path: Path, offset: int | None) -> dict[str, Any]:
    """The record at this offset; ValueError where there is none, FileNotFoundError without the file."""
    if offset is None:
        raise ValueError("only its row is known")
    with path.open("rb") as file:
        file.seek(offset)
        line = file.readline()
    record = json.loads(line)
    if not isinstance(record, dict) or "receipt" not in record:
        raise ValueError(f"{path}: no record at {offset}")
    return record
