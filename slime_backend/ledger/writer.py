"""The ledger of a run's rollouts: append-only, safe against a kill at any moment, and quick to ask.

    ledger = Ledger(run_dir)              one writer at a time; mends what a kill left behind, `notes` says what
    ledger.append(record)                 acknowledged when it returns
    with open_reader(run_dir) as reader:  any number, next to the writer too (reader.py)
        reader.find(Query(receipt="8f2c..."))

    append:   line into rollouts.jsonl -> row into the index
    rotation: a new file is opened -> rollouts.jsonl becomes rollouts/_000004.jsonl, the new file rollouts.jsonl
              (renames); where the disk refuses one of these the segment goes on, and the next append tries again
    aside:    _000004.jsonl -> 000004.parquet (complete or not at all) -> noted in the index -> lines removed

Turning a segment over takes a second, so it is done on a thread, in order, while the next one is appended to: a caller
on an event loop goes on. Until then the sealed lines are what is read.

The data are the truth: the index follows them and can be rebuilt, and if it fails, appending goes on without it. A kill
loses at most the record that was being written. Against a power cut: Parquet segments are on the disk before their
lines are removed; the last lines of the active segment are not forced out one by one.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from slime_backend.ledger.catch_up import open_index
from slime_backend.ledger.files import list_segments, parquet_module, sealed_path
from slime_backend.ledger.index import Entry, LedgerIndex
from slime_backend.ledger.lock import LedgerLock, describe_holder, lock_ledger
from slime_backend.provenance.errors import ConversionError, LedgerError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.run_files.replace import PARTIAL

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 1024 * 1024  # of lines, before a segment is sealed: some 2,500 rollouts of 1,200 tokens
LOCK_S = 30.0  # a reader that rebuilds the index holds the lock too


class Ledger:
    """The writer. Raises LedgerError where another process writes to the same run, OSError where the disk refuses."""

    def __init__(self, run_dir: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.run_dir, self.segment_bytes = run_dir, segment_bytes
        self.notes: list[str] = []  # what opening had to mend, one line each
        self.damage = Damage()  # what opening found damaged and left out of the index
        self._rotation_put_off = ""  # why the disk refused the last one
        self._lock: LedgerLock | None = lock_ledger(run_dir, LOCK_S)
        if self._lock is None:
            raise LedgerError(
                f"another process{describe_holder(RunDir(run_dir).ledger_lock_holder)} writes rollouts to {run_dir}; "
                "wait for it or choose another run"
            )
        self._index: LedgerIndex | None = None
        self._index_guard = threading.Lock()  # one connection, used by the caller and by the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._under_way: list[Future[None]] = []
        try:
            self._finish_rotations()
            self._open_active()
            if self._writer.dropped:
                self._note(f"the last record was cut off by a kill ({self._writer.dropped} bytes) and is dropped")
            self._open_index()
        except BaseException:
            self._lock.close()
            raise

    def append(self, record: RolloutRecord) -> None:
        """Store a record. When this returns, no kill of this process can lose it."""
        if self._writer.size >= self.segment_bytes:
            self._rotate()
        self._row += self._writer.torn  # what a failed append left becomes a line of its own
        offset = self._writer.append(record.to_json())
        entry = Entry(record.receipt, record.session or record.group, record.rollout_class, record.versions)
        self._with_index(lambda index: index.add(self._number, [(self._row, offset, entry)]))
        self._row += 1

    def settle(self) -> None:
        """Wait until every sealed segment is converted (seconds). Raises what a fault of that raised."""
        while self._under_way:
            self._under_way.pop(0).result()

    def close(self) -> None:
        """Settles first: whoever takes the lock next must find nobody at work."""
        self._writer.close()
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            self._let_go()

    def _let_go(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_active(self) -> None:
        self._number = list_segments(self.run_dir)[-1].number
        self._writer = JsonlWriter(RunDir(self.run_dir).rollouts)
        with self._writer.path.open("rb") as file:
            self._row = sum(1 for _ in file)

    def _open_index(self) -> None:
        try:
            self._index, notes = open_index(self.run_dir, self.damage)
        except sqlite3.Error as error:  # the index is a convenience, the records are not
            notes = [f"rollouts are recorded without an index: {error}"]
        for note in notes:
            self._note(note)

    def _rotate(self) -> None:
        """Seal the active segment. Where the disk refuses (no space, no file handle left), it goes on as it is: nothing
        is renamed before the file after it is open, and a rename without the other is taken back."""
        number = self._number
        active, sealed = RunDir(self.run_dir).rollouts, sealed_path(self.run_dir, number, "jsonl")
        following: JsonlWriter | None = None
        try:
            following = JsonlWriter(RunDir(self.run_dir).next_rollouts)
            active.rename(sealed)
            try:
                following.path.rename(active)
            except OSError:
                sealed.rename(active)
                raise
        except OSError as error:
            if following is not None:
                following.close()
            self._put_off(number, error)
            return
        following.path, self._rotation_put_off = active, ""
        with suppress(OSError):  # its records are in the system's hands
            self._writer.close()
        self._writer = following
        self._number, self._row = number + 1, 0
        self._under_way = [future for future in self._under_way if not future.done() or future.exception()]
        try:
            self._under_way.append(self._thread.submit(self._convert, number))
        except RuntimeError as error:  # no thread to be had
            self._note(f"segment {number} stays JSON lines: {error}")

    def _put_off(self, number: int, error: OSError) -> None:
        why = str(error.strerror or error)
        if why != self._rotation_put_off:
            self._note(f"segment {number} can't be sealed now ({why}); it goes on until it can")
        self._rotation_put_off = why

    def _convert(self, number: int) -> None:
        """Turn a sealed segment into Parquet. Where that fails its lines stay, and stay readable."""
        lines, parquet = sealed_path(self.run_dir, number, "jsonl"), sealed_path(self.run_dir, number, "parquet")
        try:
            rows = parquet_module().convert(lines, parquet)
        except (ConversionError, LedgerError) as error:
            self._note(f"segment {number} stays JSON lines: {error}")
            return
        try:
            size = parquet.stat().st_size
            self._with_index(lambda index: index.seal(number, size, rows) if index.rows(number) == rows else None)
            lines.unlink()
        except OSError as error:  # the Parquet file is complete and is what is read; the next opening tidies up
            self._note(f"segment {number}: its lines can't be removed yet: {error}")

    def _finish_rotations(self) -> None:
        for path in RunDir(self.run_dir).ledger.glob(f"*{PARTIAL}"):
            path.unlink()
        self._finish_renames()
        for segment in list_segments(self.run_dir):
            if segment.kind == "parquet":
                sealed_path(self.run_dir, segment.number, "jsonl").unlink(missing_ok=True)
            elif segment.sealed:
                self._note(f"segment {segment.number} was sealed and not yet Parquet; it is converted now")
                self._convert(segment.number)

    def _finish_renames(self) -> None:
        """A rotation that ended between its two renames has left a file that holds nothing yet."""
        following = RunDir(self.run_dir).next_rollouts
        if following.exists() and not following.stat().st_size:
            following.unlink()

    def _with_index(self, action: Callable[[LedgerIndex], object]) -> None:
        with self._index_guard:
            if self._index is None:
                return
            try:
                action(self._index)
            except sqlite3.Error as error:
                self._index.close()
                self._index = None
                self._note(f"the index failed and is left alone until the ledger is opened again: {error}")

    def _note(self, text: str) -> None:
        log.warning("%s: %s", self.run_dir, text)
        self.notes.append(text)
