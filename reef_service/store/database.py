"""Opening the database: what makes a commit durable, how long calls may take, and who writes."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from reef_service.store import schema
from reef_service.store.deadlines import Deadlines
from reef_service.store.errors import StoreError
from reef_service.store.migrations import migrate
from reef_service.store.only_writer import CALL_S, AdvisoryLock, FileLock, Lock, OnlyWriter

log = logging.getLogger(__name__)

BUSY_S = 30
READERS = 4
CHECKPOINT_PAGES = 4000  # of the write-ahead log, 16 MB: to copy them into the database makes one commit wait
CONNECT_S = 5  # PostgreSQL: until a connection is there
LOCK_S = 10.0  # for a lock that another transaction holds
STATEMENT_S = 25.0  # for one statement


class Database:
    """An engine to write with (one connection), one to read with, and the lock. Raises StoreError.

    `writing` False: to read next to the gateway that writes. Nothing is made, locked or changed then.
    """

    def __init__(self, url: str, *, writing: bool = True) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise StoreError(
                f"store={_hidden(url)!r} is no database address; write sqlite:///PATH or postgresql+psycopg://HOST/NAME"
            ) from error
        self.shown = parsed.render_as_string(hide_password=True)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.only_writer: OnlyWriter | None = None
        self.deadlines = Deadlines()
        try:
            self._open(parsed, writing)
        except SQLAlchemyError as error:
            self.close()
            raise StoreError(f"store {self.shown} can't be opened: {_hidden(str(error).splitlines()[0])}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, parsed: URL, writing: bool) -> None:
        if self.is_sqlite:
            _check_file(parsed, writing)
        try:
            self.writing: Engine = create_engine(parsed, pool_size=1, max_overflow=1, **_options(parsed))
            self.reading: Engine = create_engine(parsed, pool_size=READERS, max_overflow=READERS, **_options(parsed))
        except (NoSuchModuleError, ModuleNotFoundError) as error:
            raise StoreError(
                f"store {self.shown}: its driver is not installed ({error}); pip install 'reef-slime[postgres]'"
            ) from error
        if self.is_sqlite:
            # A transaction begins with the first thing that is written, at the latest. A write of the gateway's begins
            # it by itself (only_writer.py).
            event.listen(self.writing, "connect", partial(_prepare_sqlite, isolation="IMMEDIATE"))
            event.listen(self.reading, "connect", partial(_prepare_sqlite, isolation=None, reading=True))
        elif parsed.get_backend_name() == "postgresql":
            for engine in (self.writing, self.reading):
                event.listen(engine, "connect", _prepare_postgresql)
                _limit_pings(engine, self.deadlines)
        if writing:
            self.only_writer = OnlyWriter(self.writing, self._lock(parsed), self.shown, self.deadlines)
            self._make_tables()
        else:
            self._check_layout()

    def _lock(self, parsed: URL) -> Lock:
        if self.is_sqlite:
            return FileLock(Path(f"{parsed.database}.lock"))
        return AdvisoryLock(self.reading, self.deadlines)

    def _make_tables(self) -> None:
        assert self.only_writer is not None
        with self.writing.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET LOCAL statement_timeout = 0"))  # a migration takes what it takes
            schema.meta.create(connection, checkfirst=True)
            layout = connection.scalar(_LAYOUT)
            if layout is None:
                schema.tables.create_all(connection)
                connection.execute(insert(schema.meta).values(name="layout", value=str(schema.LAYOUT)))
            elif layout != str(schema.LAYOUT):
                if not layout.isdecimal() or int(layout) > schema.LAYOUT:
                    raise self._other_layout(layout)
                log.warning("store %s: layout %s is brought to %d", self.shown, layout, schema.LAYOUT)
                # SQLite begins a transaction with the first write, and all that follows is to be in it.
                connection.execute(update(schema.meta).where(schema.meta.c.name == "layout").values(value=layout))
                schema.tables.create_all(connection)  # tables that are new; those that are there stay as they are
                if not migrate(connection, int(layout)):
                    raise self._other_layout(layout)
            self.only_writer.begin(connection)

    def _check_layout(self) -> None:
        with self.reading.connect() as connection:
            layout = connection.scalar(_LAYOUT)
        if layout != str(schema.LAYOUT):
            raise OtherLayout(f"{self._other_layout(layout)}; a gateway of this version brings an older one to it")

    def _other_layout(self, layout: str | None) -> StoreError:
        return StoreError(f"store {self.shown} has layout {layout}, this version writes {schema.LAYOUT}")

    def close(self) -> None:
        if self.only_writer is not None:
            self.only_writer.close()
            self.only_writer = None
        for engine in (getattr(self, "writing", None), getattr(self, "reading", None)):
            if engine is not None:
                engine.dispose()
        self.deadlines.close()


class OtherLayout(StoreError):
    """The store is of another version, and isn't opened to change it."""


_LAYOUT = select(schema.meta.c.value).where(schema.meta.c.name == "layout")


def _check_file(parsed: URL, writing: bool) -> None:
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError("store: a gateway's records can't live in memory only; write sqlite:///PATH")
    if writing:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    elif not Path(parsed.database).is_file():
        raise StoreError(f"there is no store {parsed.database}")


def _options(parsed: URL) -> dict[str, Any]:
    """What an engine is made with; what the address itself names stays."""
    if parsed.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": BUSY_S}}
    options: dict[str, Any] = {"pool_pre_ping": True, "pool_timeout": CALL_S}
    if parsed.get_backend_name() == "postgresql":
        wanted = {
            "connect_timeout": CONNECT_S,
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": int(CALL_S * 1000),
        }
        options["connect_args"] = {name: value for name, value in wanted.items() if name not in parsed.query}
    return options


def _limit_pings(engine: Engine, deadlines: Deadlines) -> None:
    """The pool asks a connection whether it is alive before it hands it out, and would wait for ever."""
    plain = engine.dialect.do_ping

    def ping(connection: Any) -> bool:
        with deadlines.limit_driver(connection, CALL_S):
            return plain(connection)

    engine.dialect.do_ping = ping  # type: ignore[method-assign, assignment]


def _prepare_postgresql(connection: Any, record: Any) -> None:
    with connection.cursor() as cursor:
        for name, seconds in (("statement_timeout", STATEMENT_S), ("lock_timeout", LOCK_S)):
            cursor.execute(f"SET {name} = {int(seconds * 1000)}")
        cursor.execute(f"SET idle_in_transaction_session_timeout = {int(2 * CALL_S * 1000)}")
    connection.commit()


def _prepare_sqlite(connection: Any, record: Any, *, isolation: str | None, reading: bool = False) -> None:
    connection.isolation_level = isolation
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    # With the write-ahead log, FULL is what makes a commit survive a power cut; a kill it survives anyway.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
    if reading:
        cursor.execute("PRAGMA query_only = ON")
    cursor.close()


def _hidden(text: str) -> str:
    """An address without its password."""
    scheme, separator, rest = text.partition("://")
    if not separator or "@" not in rest:
        return text
    return f"{scheme}://***@{rest.rpartition('@')[2]}"
