"""Opening the database: what makes a commit durable, and that one gateway at a time writes to it."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from reef_service.store import schema
from reef_service.store.errors import StoreError
from reef_service.store.migrations import migrate

BUSY_S = 30
READERS = 4
CHECKPOINT_PAGES = 4000  # of the write-ahead log, 16 MB: to copy them into the database makes one commit wait
_ADVISORY_LOCK = 0x72656566  # PostgreSQL: any number that is ours


class Database:
    """An engine to write with (one connection), one to read with, and the lock. Raises StoreError."""

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise StoreError(
                f"store={_hidden(url)!r} is no database address; write sqlite:///PATH or postgresql+psycopg://HOST/NAME"
            ) from error
        self.shown = parsed.render_as_string(hide_password=True)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._lock: TextIO | Connection | None = None
        if self.is_sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise StoreError("store: a gateway's records can't live in memory only; write sqlite:///PATH")
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"connect_args": {"timeout": BUSY_S}} if self.is_sqlite else {"pool_pre_ping": True}
        try:
            self.writing: Engine = create_engine(parsed, pool_size=1, max_overflow=1, **options)
            self.reading: Engine = create_engine(parsed, pool_size=READERS, max_overflow=READERS, **options)
        except (NoSuchModuleError, ModuleNotFoundError) as error:
            raise StoreError(
                f"store {self.shown}: its driver is not installed ({error}); pip install 'reef-slime[postgres]'"
            ) from error
        if self.is_sqlite:
            # A transaction begins with the first thing that is written. What it read before holds nevertheless: nobody
            # else writes.
            event.listen(self.writing, "connect", partial(_prepare_sqlite, isolation="IMMEDIATE"))
            event.listen(self.reading, "connect", partial(_prepare_sqlite, isolation=None))
        try:
            self._take_lock(parsed.database or "")
            self._make_tables()
        except SQLAlchemyError as error:
            self.close()
            raise StoreError(f"store {self.shown} can't be opened: {_hidden(str(error).splitlines()[0])}") from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self, path: str) -> None:
        if self.is_sqlite:
            lock = Path(path + ".lock").open("w")  # noqa: SIM115 - held as long as the database is open
            self._lock = lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StoreError(f"another gateway writes to {self.shown}; stop it or name another store") from error
            return
        connection = self.reading.connect()
        self._lock = connection
        if not connection.scalar(text(f"SELECT pg_try_advisory_lock({_ADVISORY_LOCK})")):
            raise StoreError(f"another gateway writes to {self.shown}; stop it or name another store")
        connection.commit()

    def _make_tables(self) -> None:
        with self.writing.begin() as connection:
            schema.meta.create(connection, checkfirst=True)
            found = connection.scalar(select(schema.meta.c.value).where(schema.meta.c.name == "layout"))
            if found is None:
                schema.tables.create_all(connection)
                connection.execute(insert(schema.meta).values(name="layout", value=str(schema.LAYOUT)))
                return
            if found == str(schema.LAYOUT):
                return
            if not found.isdecimal() or int(found) > schema.LAYOUT:
                raise StoreError(f"store {self.shown} has layout {found}, this version writes {schema.LAYOUT}")
            # SQLite begins a transaction with the first write, and all that follows is to be in it.
            connection.execute(update(schema.meta).where(schema.meta.c.name == "layout").values(value=found))
            schema.tables.create_all(connection)  # tables that are new; those that are there stay as they are
            if not migrate(connection, int(found)):
                raise StoreError(f"store {self.shown} has layout {found}, this version writes {schema.LAYOUT}")

    def close(self) -> None:
        if self._lock is not None:
            with suppress(SQLAlchemyError):  # a server that is gone has let the lock go
                self._lock.close()
            self._lock = None
        self.writing.dispose()
        self.reading.dispose()


def _prepare_sqlite(connection: Any, record: Any, *, isolation: str | None) -> None:
    connection.isolation_level = isolation
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    # With the write-ahead log, FULL is what makes a commit survive a power cut; a kill it survives anyway.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
    cursor.close()


def _hidden(text: str) -> str:
    """An address without its password."""
    scheme, separator, rest = text.partition("://")
    if not separator or "@" not in rest:
        return text
    return f"{scheme}://***@{rest.rpartition('@')[2]}"
