"""One gateway writes to a store: a lock that ends with its holder, watched, and a number in the store that it fences.

    lock     PostgreSQL: an advisory lock, held by a connection of its own. SQLite: flock on a file next to the database
    number   `fence` in `meta`, one more each time that a gateway takes the lock; compared in every write's transaction

The lock is gone with its connection (a restart of the server, a failover, a cut), so it is looked at while there is
nothing to write too, and taken again. What says that nobody else writes is the number: whoever took the lock in the
meantime has raised it, and from then on no transaction of the former holder goes through.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from sqlalchemy import Connection, Engine, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from reef_service.store import schema
from reef_service.store.deadlines import Deadlines
from reef_service.store.errors import StoreError

log = logging.getLogger(__name__)
CALL_S = 30.0  # for one transaction, whatever the server does
UNLOCK_S = 2.0  # for a lock to be given back; it ends with its connection anyway
WATCH_S = 1.0  # between two looks at the lock
_ADVISORY_LOCK = 0x72656566  # PostgreSQL: any number that is ours
_FENCE = select(schema.meta.c.value).where(schema.meta.c.name == "fence")
# In PostgreSQL whoever raises the number waits for the writes that have read it.
_FENCE_HELD = _FENCE.with_for_update(read=True)


class Lock(Protocol):
    def take(self) -> bool:
        """Return whether it is ours now."""

    def is_held(self) -> bool: ...

    def close(self) -> None: ...


class OnlyWriter:
    """Used by one thread: the one that writes."""

    def __init__(self, engine: Engine, lock: Lock, shown: str, deadlines: Deadlines) -> None:
        """Raises StoreError where another gateway has the lock."""
        self._engine, self._lock, self.shown, self._deadlines = engine, lock, shown, deadlines
        self.number = 0
        self.on_taken: Callable[[], None] = lambda: None
        self._held = lock.take()
        self._looked_at = time.monotonic()
        if not self._held:
            raise StoreError(f"another gateway writes to {shown}; stop it or name another store")

    def begin(self, connection: Connection) -> None:
        """Raise the number: from now on nobody else's writes go through. In a transaction of the caller's."""
        found = connection.scalar(_FENCE)
        self.number = int(found or 0) + 1
        if found is None:
            connection.execute(insert(schema.meta).values(name="fence", value=str(self.number)))
        else:
            connection.execute(update(schema.meta).where(schema.meta.c.name == "fence").values(value=str(self.number)))

    def check(self, connection: Connection) -> None:
        """In every write's transaction, before anything else. Raises StoreError where another one may be writing."""
        self.look()
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # what is read here holds until the commit
            found = connection.scalar(_FENCE)
        else:
            found = connection.scalar(_FENCE_HELD)
        if found != str(self.number):
            self._held = False
            raise StoreError(
                f"another gateway has taken over {self.shown} (writer {found}, this one is {self.number}); nothing is "
                "written until it has stopped"
            )

    def look(self) -> None:
        """Notice that the lock is gone, and take it again. Raises StoreError where it can't be had."""
        now = time.monotonic()
        if now - self._looked_at >= WATCH_S:
            self._looked_at = now
            if not (self._held and self._lock.is_held()):
                self._held = False
                self._take_again()
        if not self._held:
            raise StoreError(f"the lock of {self.shown} is lost, and another gateway has it, or the server is away")

    def _take_again(self) -> None:
        try:
            if not self._lock.take():
                return
            with self._engine.begin() as connection, self._deadlines.limit(connection, CALL_S):
                alone = connection.scalar(_FENCE) == str(self.number)
                self.begin(connection)
        except (SQLAlchemyError, OSError):  # tried again at the next look
            return
        self._held = True
        log.warning("the lock of %s was lost and is taken again; this gateway is writer %d", self.shown, self.number)
        if not alone:
            self.on_taken()

    def close(self) -> None:
        self._lock.close()


class FileLock:
    """flock on a file, which must still be the one at its path: a new file there is a lock of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def take(self) -> bool:
        self.close()
        file = self.path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._file = file
        return self.is_held()

    def is_held(self) -> bool:
        if self._file is None:
            return False
        try:
            here, there = os.fstat(self._file.fileno()), self.path.stat()
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class AdvisoryLock:
    """An advisory lock of PostgreSQL, which ends with the connection that took it."""

    def __init__(self, engine: Engine, deadlines: Deadlines) -> None:
        self._engine, self._deadlines = engine, deadlines
        self._connection: Connection | None = None

    def take(self) -> bool:
        self.close()
        connection = self._engine.connect()
        try:
            taken = bool(self._ask(connection, f"SELECT pg_try_advisory_lock({_ADVISORY_LOCK})"))
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        if not taken:
            connection.close()
            return False
        self._connection = connection
        return True

    def is_held(self) -> bool:
        """Return whether the connection is there and the server says that it has the lock."""
        if self._connection is None:
            return False
        held = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() "
            f"AND objid = {_ADVISORY_LOCK}"
        )
        try:
            return bool(self._ask(self._connection, held))
        except SQLAlchemyError:
            return False

    def _ask(self, connection: Connection, question: str, seconds: float | None = None) -> Any:
        with self._deadlines.limit(connection, CALL_S if seconds is None else seconds):
            found = connection.scalar(text(question))
            connection.commit()
            return found

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):  # a server that is gone has let the lock go
                self._ask(connection, f"SELECT pg_advisory_unlock({_ADVISORY_LOCK})", UNLOCK_S)
            with suppress(SQLAlchemyError):
                connection.invalidate()  # given back to the pool it might keep the lock
                connection.close()
