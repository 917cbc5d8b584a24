"""The store as the gateway uses it: writes are on the disk when they return, reads run at the same time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from reef_service.store import counters, groups, jobs, leases, samples
from reef_service.store.database import CALL_S, READERS, Database, OtherLayout
from reef_service.store.errors import StoreError
from reef_service.store.leases import Lease, Wish
from reef_service.store.repeats import StoredAnswer, read_answer
from reef_service.store.reports import Report, add_report
from reef_service.store.retention import Limit, remove_some
from reef_service.store.samples import StoredSample
from reef_service.store.schema import meta, publications, turns
from reef_service.store.sessions import read_session
from reef_service.store.turns import History, Placed, Turn, VersionNumbers, add_turn, record_of
from reef_service.store.writer import GRACE_S, Writer
from slime_backend.provenance.records import RolloutRecord

T = TypeVar("T")
SAMPLE_S = 0.1  # to read one, more than enough


class Store:
    """Safe for use from one event loop; see `open_store`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        assert database.only_writer is not None
        self.writer = Writer(database.writing, database.only_writer, database.deadlines)
        self._numbers = VersionNumbers()
        database.only_writer.on_taken = self._numbers.forget_all  # another gateway has published meanwhile
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    # ---- written ------------------------------------------------------------------------------------------------

    async def add_turn(self, turn: Turn) -> Placed:
        return await self.writer.write(lambda connection: add_turn(connection, turn, self._numbers))

    async def add_report(self, report: Report) -> dict[str, Any]:
        """Raises ReportConflict, UnknownReceipts."""
        return await self.writer.write(lambda connection: add_report(connection, report))

    async def lease(self, wish: Wish) -> Lease:
        return await self.writer.write(lambda connection: leases.give(connection, wish))

    async def ack(self, lease_id: str, job: str | None = None) -> int:
        """Raises UnknownLease, LeaseGone."""
        return await self.writer.write(lambda connection: leases.ack(connection, lease_id, job))

    async def release(self, lease_id: str, job: str | None = None) -> int:
        """Raises UnknownLease, LeaseGone for another job's."""
        return await self.writer.write(lambda connection: leases.release(connection, lease_id, job))

    async def saved(self, job: str, step: int, lease_s: float | None) -> dict[str, Any]:
        """A job's checkpoint holds its training up to `step`; see jobs.py."""
        return await self.writer.write(lambda connection: jobs.saved(connection, job, step, lease_s))

    async def close_groups(self, size: int, labels: Sequence[str] | None, idle_s: float) -> dict[str, int]:
        return await self.writer.write(lambda connection: groups.close_groups(connection, size, labels, idle_s))

    async def remove_some(self, limit: Limit) -> list[str]:
        """Remove a few of the sessions that the limit lets go; their names."""
        return await self.writer.write(lambda connection: remove_some(connection, limit))

    async def add_publication(
        self, version: str, state: str, *, checkpoint: str = "", report: dict[str, Any] | None = None
    ) -> int:
        """Returns its number. `state`: found (at start), or that of the publication's report."""

        def add(connection: Connection) -> int:
            self._numbers.forget(version)
            values = {"version": version, "state": state, "checkpoint": checkpoint, "at": time.time()}
            added = connection.execute(insert(publications).values(report=json.dumps(report or {}), **values))
            return int(added.inserted_primary_key[0])  # type: ignore[index]

        return await self.writer.write(add)

    async def probe(self) -> None:
        """Write something, as every answer will have to be. Raises StoreError."""

        def write(connection: Connection) -> None:
            row = {"name": "probe", "value": str(time.time())}
            if not connection.execute(update(meta).where(meta.c.name == "probe").values(row)).rowcount:
                connection.execute(insert(meta).values(row))

        await self.writer.write(write)

    # ---- read ---------------------------------------------------------------------------------------------------

    async def read(self, query: Callable[[Connection], T], more_s: float = 0.0) -> T:
        """Raises StoreError where the database doesn't answer within `CALL_S`, and `more_s` for what is known to take
        longer."""
        database, seconds = self._database, CALL_S + more_s

        def run() -> T:
            try:
                with database.reading.connect() as connection, database.deadlines.limit(connection, seconds):
                    found = query(connection)
                    connection.rollback()  # here, and not when it is handed back, where nothing bounds it
                    return found
            except SQLAlchemyError as error:
                raise StoreError(f"the store can't be read: {str(error).splitlines()[0]}") from error

        try:
            async with asyncio.timeout(seconds + GRACE_S):
                return await asyncio.get_running_loop().run_in_executor(self._readers, run)
        except TimeoutError:
            raise StoreError(f"the store can't be read within {seconds + GRACE_S:g} s") from None

    async def samples(self, lease: Lease) -> list[StoredSample]:
        def read(connection: Connection) -> list[StoredSample]:
            return [samples.read_sample(connection, key) for key in lease.samples]

        return await self.read(read, SAMPLE_S * len(lease.samples))

    async def incomplete_groups(self, size: int, limit: int) -> list[dict[str, Any]]:
        return await self.read(lambda connection: groups.incomplete_groups(connection, size, limit))

    async def job_leases(self, job: str) -> list[dict[str, Any]]:
        return await self.read(lambda connection: jobs.open_leases(connection, job))

    async def history(self, session: str) -> list[tuple[str, History, int]]:
        return await self.read(lambda connection: samples.read_history(connection, session))

    async def answer(self, session: str, request: str, key: str) -> StoredAnswer | None:
        """What a request was answered that came before. Raises KeyUsed."""
        return await self.read(lambda connection: read_answer(connection, session, request, key))

    async def tokens(self, receipt: str) -> list[int] | None:
        return await self.read(lambda connection: samples.read_tokens(connection, receipt))

    async def turn(self, receipt: str) -> dict[str, Any] | None:
        return await self.read(lambda connection: samples.read_turn(connection, receipt))

    async def session(self, name: str) -> dict[str, Any] | None:
        return await self.read(lambda connection: read_session(connection, name))

    async def counts(self) -> dict[str, Any]:
        return await self.read(counters.read_counts)

    async def is_used(self, version: str) -> bool:
        """Return whether engines served a version of this name."""
        return await self.read(lambda connection: samples.read_is_used(connection, version))

    async def publications(self, limit: int = 50) -> list[dict[str, Any]]:
        return list(await self.read(lambda connection: samples.read_publications(connection, limit)))

    def records(self) -> Iterator[RolloutRecord]:
        """Every turn with complete provenance, oldest first; blocks, for use without the event loop."""
        return read_records(self._database)

    def close(self) -> None:
        self.writer.close()
        self._readers.shutdown()
        self._database.close()


def read_records(database: Database) -> Iterator[RolloutRecord]:
    query = select(turns).where(turns.c.state == "complete").order_by(turns.c.finished_at, turns.c.receipt)
    with database.reading.connect().execution_options(yield_per=200) as connection:
        for row in connection.execute(query).mappings():
            yield record_of(row)


@contextmanager
def open_records(url: str) -> Iterator[Iterator[RolloutRecord]]:
    """Every turn with complete provenance of a store, also of one that a gateway writes to; oldest first.

    A store of an older version is brought to this one first, if no gateway has it. Raises StoreError.
    """
    try:
        database = Database(url, writing=False)
    except OtherLayout:
        Database(url).close()
        database = Database(url, writing=False)
    try:
        yield read_records(database)
    finally:
        database.close()


@contextmanager
def open_store(url: str) -> Iterator[Store]:
    """Open, and make where it isn't there. Raises StoreError, one line, without the address's password."""
    store = Store(Database(url))
    try:
        yield store
    finally:
        store.close()
