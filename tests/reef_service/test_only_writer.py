"""One gateway writes, whatever happens to its lock; no call of the store waits for ever; a live store can be read."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from reef_service.store import StoreError, only_writer, open_records, open_store, writer
from reef_service.store import store as store_module
from reef_service.store.database import Database
from tests import waiting
from tests.reef_service.examples import turn
from tests.reef_service.old_stores import to_layout_1
from tests.reef_service.postgres_server import processes


@contextmanager
def asking(url):
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def lose_lock(url):
    """As a restart of the server does, or somebody who removes the lock's file."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///") + ".lock").unlink()
        return
    with asking(url) as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.execute(text(others + " AND backend_type = 'client backend'"))


def test_a_lost_lock_is_taken_again_while_there_is_nothing_to_write(store_url, run_async):
    with open_store(store_url) as store:
        run_async(store.add_turn(turn("a")))
        number = store._database.only_writer.number
        lose_lock(store_url)
        waiting.wait_until(lambda: store._database.only_writer.number == number + 1, "the lock is taken again")
        with pytest.raises(StoreError, match="another gateway writes to"):
            open_store(store_url).__enter__()
        run_async(store.add_turn(turn("b", session="t")))
        assert {r.receipt for r in store.records()} == {"a", "b"}


def test_who_lost_the_lock_to_another_writes_nothing_until_that_has_stopped(store_url, run_async, monkeypatch):
    async def add(store, receipt):
        await store.add_turn(turn(receipt, session=receipt))

    with open_store(store_url) as old:
        run_async(add(old, "before"))
        monkeypatch.setattr(only_writer, "WATCH_S", 3600.0)  # as a process that was stopped for a while
        lose_lock(store_url)
        with open_store(store_url) as new:
            run_async(add(new, "new"))
            with pytest.raises(StoreError, match="another gateway has taken over"):
                run_async(add(old, "old"))
            monkeypatch.setattr(only_writer, "WATCH_S", 0.0)
            with pytest.raises(StoreError, match="is lost"):
                run_async(add(old, "old"))
            run_async(add(new, "new again"))
        run_async(add(old, "after"))
        assert {r.receipt for r in old.records()} == {"before", "new", "new again", "after"}


def test_control_without_the_number_both_write(store_url, run_async, monkeypatch):
    monkeypatch.setattr(only_writer, "WATCH_S", 3600.0)
    monkeypatch.setattr(only_writer.OnlyWriter, "check", lambda self, connection: None)
    with open_store(store_url) as old:
        lose_lock(store_url)
        with open_store(store_url) as new:
            run_async(new.add_turn(turn("new", session="new")))
            run_async(old.add_turn(turn("old", session="old")))
            assert {r.receipt for r in new.records()} == {"new", "old"}


def test_a_connection_that_was_cut_costs_no_write(store_url, run_async):
    """Of the server's side: the transaction is begun on another one."""

    async def work(store):
        await store.add_turn(turn("a"))
        lose_lock(store_url)
        await asyncio.gather(*(store.add_turn(turn(f"t{i}", session=f"t{i}")) for i in range(8)))
        return len(await store.history("t3"))

    with open_store(store_url) as store:
        assert run_async(work(store)) == 1


def test_after_a_restart_of_the_server_there_is_still_one_writer(own_postgres, run_async):
    """kill -9 of the server, twice: all that was acknowledged is there, and nobody else gets in."""

    async def add(store, receipt):
        try:
            await store.add_turn(turn(receipt, session=receipt))
        except StoreError:
            return False
        return True

    async def work(store):
        stored = []
        for round_ in range(2):
            stored += [f"a{round_}"] if await add(store, f"a{round_}") else []
            number = store._database.only_writer.number
            own_postgres.kill()
            assert not await add(store, f"lost{round_}")
            own_postgres.start()
            await waiting.until(lambda: store._database.only_writer.number > number, "the lock is taken again")  # noqa: B023
            with pytest.raises(StoreError, match="another gateway writes to"):
                open_store(own_postgres.url).__enter__()
            assert await add(store, f"b{round_}")
            stored.append(f"b{round_}")
        return stored, await store.history("a0")

    with open_store(own_postgres.url) as store:
        stored, history = run_async(work(store), 200)
        assert {r.receipt for r in store.records()} == set(stored) == {"a0", "b0", "a1", "b1"}
        assert len(history) == 1


@contextmanager
def frozen(url):
    """The processes of a PostgreSQL server, stopped."""
    with asking(url) as connection:
        data = Path(connection.scalar(text("SHOW data_directory")))
    parent = int((data / "postmaster.pid").read_text().split()[0])
    stopped = processes(parent)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_frozen_server_holds_nobody(postgres, run_async, monkeypatch, when):
    """What is finished is refused within the deadline, and all goes on when the server does."""
    for module in (writer, store_module, only_writer):
        monkeypatch.setattr(module, "CALL_S", 1.0)
    for module in (writer, store_module):
        monkeypatch.setattr(module, "GRACE_S", 1.0)
    with asking(postgres) as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))

    async def ask(store):
        writes = [store.add_turn(turn(f"w{i}-{time.time_ns()}", session=f"w{i}")) for i in range(64)]
        reads = [store.history("a") for _ in range(16)]
        return await asyncio.gather(*writes, *reads, return_exceptions=True)

    async def work(store):
        await store.add_turn(turn("a", session="a"))
        await store.history("a")
        if when == "idle":
            store.writer._let_go()
        with frozen(postgres):
            found = await asyncio.wait_for(ask(store), 60)
        assert all(isinstance(each, StoreError) for each in found), found
        await waiting.until(lambda: works(store), "it works again")

    async def works(store):
        try:
            await store.add_turn(turn(f"again-{time.time_ns()}", session="b"))
            return bool(await store.history("b"))
        except StoreError:
            return False

    with open_store(postgres) as store:
        run_async(work(store), 120)


def test_a_live_store_is_read_and_not_changed(store_url, run_async):
    with open_store(store_url) as store:
        run_async(store.add_turn(turn("a")))
        with open_records(store_url) as records:
            assert [r.receipt for r in records] == ["a"]
        run_async(store.add_turn(turn("b", session="t")))
        with open_records(store_url) as records:
            assert [r.receipt for r in records] == ["a", "b"]
        reader = Database(store_url, writing=False)
        if store_url.startswith("sqlite"):
            with pytest.raises(Exception, match="readonly"), reader.reading.begin() as connection:
                connection.execute(text("DELETE FROM turns"))
        reader.close()
    with open_records(store_url) as records:  # and when the gateway has stopped
        assert [r.receipt for r in records] == ["a", "b"]


def test_an_older_store_is_read_where_no_gateway_has_it(store_url, run_async):
    with open_store(store_url) as store:
        run_async(store.add_turn(turn("a")))
    to_layout_1(store_url)
    with open_records(store_url) as records:
        assert [r.receipt for r in records] == ["a"]


def test_reading_makes_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"there is no store .*none\.sqlite"):
        open_records(f"sqlite:///{tmp_path}/none.sqlite").__enter__()
    assert not list(tmp_path.iterdir())
