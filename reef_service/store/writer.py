"""One thread that writes, and commits what many requests wait for together.

A commit with a sync to the disk takes milliseconds; 64 requests that end together would wait for 64 of them. So the
writer takes everything that has queued up, runs it in one transaction, commits, and only then answers anybody. An
operation that fails costs the others nothing: the transaction is rolled back and each is run again by itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from reef_service.store.errors import StoreError

T = TypeVar("T")
Operation = Callable[[Connection], Any]  # may be run twice; what it did the first time is rolled back
MOST = 256  # operations in one transaction
IDLE_S = 1.0  # without anything to write, until the connection is given back

_Job = tuple[Operation, "Future[Any]"]


class Writer:
    """Runs operations in the order in which they are given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
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
        return await asyncio.shield(asyncio.wrap_future(self.submit(operation)))

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
            if len(jobs) > 1 and self._together(jobs):
                continue
            for job in jobs:
                self._alone(job)
        self._let_go()

    def _take(self) -> tuple[list[_Job], bool]:
        """Return what is queued, at least one job, and whether the writer is to stop after it."""
        found: list[_Job] = []
        while len(found) < MOST:
            try:
                job = self._jobs.get(block=not found, timeout=None if self._connection is None else IDLE_S)
            except queue.Empty:
                if found:
                    break
                self._let_go()
                continue
            if job is None:
                return found, True
            found.append(job)
        return found, False

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Run a transaction on a connection that is kept while there is something to do.

        To fetch one from the pool, which checks that it is alive, and to hand it back takes longer than most writes.
        """
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._connection.begin():
                yield self._connection
        except BaseException:
            self._let_go()
            raise

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
        self.commits += 1
        self.operations += len(jobs)
        for (_, future), result in zip(jobs, results, strict=True):
            future.set_result(result)
        return True

    def _alone(self, job: _Job) -> None:
        operation, future = job
        try:
            with self._transaction() as connection:
                result = operation(connection)
        except SQLAlchemyError as error:
            future.set_exception(StoreError(f"the store failed: {_first_line(error)}"))
        except Exception as error:  # a refusal of the operation's own: its caller's to handle
            future.set_exception(error)
        else:
            self.commits += 1
            self.operations += 1
            with suppress(asyncio.InvalidStateError):
                future.set_result(result)


def _first_line(error: SQLAlchemyError) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
