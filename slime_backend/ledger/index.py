"""The ledger's index: where the rollouts of a receipt, a session, a version or a class lie. SQLite, and disposable.

The segments are the truth. Every row here is worked out from a record again, so a lost, damaged or stale index is
rebuilt (catch_up.py), and that is logged. One writer at a time; readers may look on (write-ahead log).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.provenance.classes import classify
from slime_backend.provenance.kv_contexts import read_segments
from slime_backend.run_files import RunDir
from slime_backend.wire import Prefill, Span

ROW_BITS = 32  # id = segment << 32 | row
CACHE_KIB = 65536  # receipts are random, so inserts touch pages everywhere
BUSY_S = 5.0

_TABLES = """
CREATE TABLE rollouts(id INTEGER PRIMARY KEY, offset INTEGER, receipt TEXT NOT NULL, session TEXT NOT NULL,
                      class TEXT NOT NULL);
CREATE INDEX by_receipt ON rollouts(receipt);
CREATE INDEX by_session ON rollouts(session);
CREATE TABLE versions(version TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY(version, id)) WITHOUT ROWID;
CREATE TABLE sealed(segment INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, rows INTEGER NOT NULL);
PRAGMA user_version = 1;
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is indexed of one record."""

    receipt: str
    session: str
    rollout_class: str
    versions: tuple[str, ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Entry:
        """From a stored record; the class is worked out again, since a file may hold anything."""
        spans = [Span.from_json(s) for s in data["spans"]]
        segments = read_segments(data["segments"])
        prefills = [Prefill.from_json(p) for p in data["prefills"]]
        return cls(
            data["receipt"],
            data.get("session") or data["group"],
            classify(spans, segments, prefills),
            tuple(dict.fromkeys(s.version for s in spans)),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies. `offset`: of its line, in bytes; None where only its row is known."""

    segment: int
    row: int
    offset: int | None
    receipt: str  # to check what is found there


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for; all that is given must hold. A receipt may be given by its beginning."""

    receipt: str | None = None
    session: str | None = None
    version: str | None = None  # sampled some of its tokens
    rollout_class: str | None = None

    def sql(self) -> tuple[str, list[Any]]:
        source, conditions, values = "rollouts r", [], []
        if self.version is not None:
            source = "versions v JOIN rollouts r ON r.id = v.id"
            conditions.append("v.version = ?")
            values.append(self.version)
        if self.receipt is not None:
            conditions.append("r.receipt >= ? AND r.receipt < ?")
            values += [self.receipt, self.receipt + "\U0010ffff"]
        for column, value in (("session", self.session), ("class", self.rollout_class)):
            if value is not None:
                conditions.append(f"r.{column} = ?")
                values.append(value)
        return f"FROM {source}" + (f" WHERE {' AND '.join(conditions)}" if conditions else ""), values


class LedgerIndex:
    """An open index. Raises sqlite3.Error from every method where the file is damaged."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        """`path` None: in memory, for a reader that can't write next to the data."""
        if path is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None)
        else:
            uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
        try:
            self._prepare(read_only)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if not read_only:
            # Consistent after a power cut, and behind at worst, which catching up mends.
            self._journal()
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 8000")  # pages
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found == 0 and not read_only:
            self._db.executescript(f"BEGIN; {_TABLES} COMMIT;")
        elif found != 1:
            raise sqlite3.DatabaseError(f"its layout is number {found}, not 1")

    def _journal(self) -> None:
        """A write-ahead log, which readers may look into; a plain journal where the file system can't (it needs shared
        memory, which network file systems lack)."""
        try:
            mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError:
            mode = ""
        if mode not in ("wal", "memory"):
            self._db.execute("PRAGMA journal_mode = DELETE")

    def add(self, segment: int, rows: Iterable[tuple[int, int | None, Entry]]) -> None:
        """Index (row, offset, entry) of a segment, in one transaction."""
        base = segment << ROW_BITS
        records, versions = [], []
        for row, offset, e in rows:
            records.append((base | row, offset, e.receipt, e.session, e.rollout_class))
            versions += [(version, base | row) for version in e.versions]
        self._db.execute("BEGIN")
        try:
            self._db.executemany("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?)", records)
            self._db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?)", versions)
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # the first error is the one to tell
                self._db.execute("ROLLBACK")
            raise

    def seal(self, segment: int, size: int, rows: int) -> None:
        """Note that the segment's Parquet file of `size` bytes holds the `rows` rows that are indexed."""
        self._db.execute("INSERT OR REPLACE INTO sealed VALUES (?, ?, ?)", (segment, size, rows))

    def rows(self, segment: int) -> int:
        """Rows of this segment that are indexed."""
        low, high = segment << ROW_BITS, (segment + 1) << ROW_BITS
        last = self._db.execute("SELECT max(id) FROM rollouts WHERE id >= ? AND id < ?", (low, high)).fetchone()[0]
        return 0 if last is None else int(last - low) + 1

    def place(self, segment: int, row: int) -> tuple[int | None, str] | None:
        """(offset, receipt) of an indexed row."""
        found = self._db.execute(
            "SELECT offset, receipt FROM rollouts WHERE id = ?", (segment << ROW_BITS | row,)
        ).fetchone()
        return None if found is None else (found[0], found[1])

    def places(self, segment: int) -> dict[int, tuple[int | None, str]]:
        """Row -> (offset, receipt) of every indexed row of a segment."""
        low, high = segment << ROW_BITS, (segment + 1) << ROW_BITS
        found = self._db.execute("SELECT id, offset, receipt FROM rollouts WHERE id >= ? AND id < ?", (low, high))
        return {int(number - low): (offset, receipt) for number, offset, receipt in found}

    def forget(self, segment: int, *, and_later: bool = False) -> int:
        """Remove a segment's rows, those of all later ones too if asked; how many there were."""
        low = segment << ROW_BITS
        high = 1 << 62 if and_later else (segment + 1) << ROW_BITS
        self._db.execute("BEGIN")
        gone = self._db.execute("DELETE FROM rollouts WHERE id >= ? AND id < ?", (low, high)).rowcount
        self._db.execute("DELETE FROM versions WHERE id >= ? AND id < ?", (low, high))
        upper = high >> ROW_BITS
        self._db.execute("DELETE FROM sealed WHERE segment >= ? AND segment < ?", (segment, upper))
        self._db.execute("COMMIT")
        return gone

    def segments(self) -> set[int]:
        """Every segment that has rows here; one look per segment, not per row."""
        found: set[int] = set()
        next_id: int | None = self._db.execute("SELECT min(id) FROM rollouts").fetchone()[0]
        while next_id is not None:
            number = next_id >> ROW_BITS
            found.add(number)
            after = ((number + 1) << ROW_BITS,)
            next_id = self._db.execute("SELECT min(id) FROM rollouts WHERE id >= ?", after).fetchone()[0]
        return found

    def sealed(self) -> dict[int, tuple[int, int]]:
        """Segment -> (bytes of its Parquet file, rows)."""
        return {s: (size, rows) for s, size, rows in self._db.execute("SELECT segment, bytes, rows FROM sealed")}

    def find(self, query: Query, limit: int | None = None) -> list[Place]:
        """Oldest first."""
        source, values = query.sql()
        found = self._db.execute(
            f"SELECT r.id, r.offset, r.receipt {source} ORDER BY r.id LIMIT ?",
            [*values, -1 if limit is None else limit],
        )
        mask = (1 << ROW_BITS) - 1
        return [Place(number >> ROW_BITS, number & mask, offset, receipt) for number, offset, receipt in found]

    def count(self, query: Query) -> int:
        source, values = query.sql()
        return int(self._db.execute(f"SELECT count(*) {source}", values).fetchone()[0])

    def close(self) -> None:
        self._db.close()


def index_path(run_dir: Path) -> Path:
    return RunDir(run_dir).ledger_index


def remove_index(run_dir: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path = index_path(run_dir)
        path.with_name(path.name + suffix).unlink(missing_ok=True)
