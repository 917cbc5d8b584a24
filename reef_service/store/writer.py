"""One thread that writes, and commits what many requests wait for together.

A commit with a sync to the disk takes milliseconds; 64 requests that end together would wait for 64 of them. So the
writer takes everything that has queued up, runs it in one transaction, commits, and only then answers anybody. An
operation that fails costs the others nothing: the transaction is rolled back and each is run again by itself. Where it
is the database that fails, nothing is run again one by one: each would wait for it as long as the first.

Nobody waits for longer than `CALL_S`, whatever the database does. What wasn't begun by then is never written; what was
may be.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, RootTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from reef_service.store.database import CALL_S
from reef_service.store.deadlines import Deadlines
from reef_service.store.errors import StoreError
from reef_service.store.only_writer import WATCH_S, OnlyWriter

T = TypeVar("T")
Operation = Callable[[Connection], Any]  # may be run twice; what it did the first time is rolled back
MOST = 256  # operations in one transaction
GRACE_S = 5.0  # for the database's own last word after its time

_Job = tuple[Operation, "Future[Any]"]


class Writer:
    """Runs operations in the order in which they are given, as long as this is the store's only writer."""

    def __init__(self, engine: Engine, only_writer: OnlyWriter, deadlines: Deadlines) -> None:
        self._engine, self._only_writer, self._deadlines = engine, only_writer, deadlines
        self._connection: Connection | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self.commits = 0
        self.operations = 0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(self, operation: Callable[[Connection], T]) -> T:
        """The operation's result, once it is committed. Raises what it raised, or StoreError for the database's own.

        A caller that is cancelled meanwhile does not take it back.
        """
        future = self.submit(operation)
        try:
            async with asyncio.timeout(CALL_S + GRACE_S):
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            future.cancel()  # succeeds where it isn't begun
            raise StoreError(f"the store has not written within {CALL_S + GRACE_S:g} s") from None

    def submit(self, operation: Callable[[Connection], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(StoreError("the store is closed"))
        else:
            self._jobs.put((operation, future))
        return future

    def waiting(self) -> int:
        return self._jobs.qsize()

    def close(self) -> None:
        """Write what is queued, then stop."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            jobs, last = self._take()
            jobs = [job for job in jobs if job[1].set_running_or_notify_cancel()]
            if not jobs:
                self._watch()
            elif len(jobs) == 1 or not self._together(jobs):
                self._one_by_one(jobs)
        self._let_go()

    def _watch(self) -> None:
        """Look at the lock while there is nothing to write; what is wrong with it, the next write says."""
        with suppress(StoreError):
            self._only_writer.look()

    def _take(self) -> tuple[list[_Job], bool]:
        """Return what is queued, nothing after `WATCH_S`, and whether the writer is to stop after it."""
        found: list[_Job] = []
        while len(found) < MOST:
            try:
                job = self._jobs.get(block=not found, timeout=WATCH_S)
            except queue.Empty:
                break
            if job is None:
                return found, True
            found.append(job)
        return found, False

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Run a transaction on a connection that is kept while there is something to do.

        To fetch one from the pool, which checks that it is alive, and to hand it back takes longer than most writes.
        One that was lost since the last transaction is replaced.
        """
        kept = self._connection is not None
        with ExitStack() as limits:
            try:
                try:
                    connection, transaction = self._begin(limits)
                except SQLAlchemyError:
                    if not kept:
                        raise
                    self._let_go()
                    connection, transaction = self._begin(limits)
                with transaction:
                    yield connection
            except BaseException:
                self._let_go()
                raise

    def _begin(self, limits: ExitStack) -> tuple[Connection, RootTransaction]:
        if self._connection is None:
            self._connection = self._engine.connect()
        limits.enter_context(self._deadlines.limit(self._connection, CALL_S))
        transaction = self._connection.begin()
        self._only_writer.check(self._connection)
        return self._connection, transaction

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):  # a server that is gone has let it go
                connection.close()

    def _together(self, jobs: list[_Job]) -> bool:
        """Run all in one transaction; False, with nothing done, where one of them fails."""
        try:
            with self._transaction() as connection:
                results = [operation(connection) for operation, _ in jobs]
        except Exception:  # whichever it was and whatever it raised: each is run again, and raises by itself
            return False
        self._count(len(jobs))
        for (_, future), result in zip(jobs, results, strict=True):
            future.set_result(result)
        return True

    def _one_by_one(self, jobs: list[_Job]) -> None:
        lost: StoreError | None = None
        for operation, future in jobs:
            if lost is not None:
                future.set_exception(lost)
                continue
            begun = False
            try:
                with self._transaction() as connection:
                    begun = True
                    result = operation(connection)
            except SQLAlchemyError as error:
                failure = StoreError(f"the store failed: {_first_line(error)}")
                lost = failure if not begun or _is_lost(error) else None
                future.set_exception(failure)
            except Exception as error:  # a refusal of the operation's own: its caller's to handle
                lost = error if not begun and isinstance(error, StoreError) else None
                future.set_exception(error)
            else:
                self._count(1)
                future.set_result(result)

    def _count(self, operations: int) -> None:
        self.commits += 1
        self.operations += operations


def _is_lost(error: SQLAlchemyError) -> bool:
    """Return whether the connection is gone, rather than the operation at fault."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _first_line(error: SQLAlchemyError) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
