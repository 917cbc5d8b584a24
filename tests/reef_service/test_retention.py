"""What was trained on is removed when it is old or the store is large; what may still be trained on never is."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import event, text

from reef_service.store import open_store
from reef_service.store.counters import scanned
from reef_service.store.leases import Wish
from reef_service.store.reports import Report
from reef_service.store.retention import AT_ONCE, Limit, remove_some
from tests.reef_service.examples import turn
from tests.reef_service.harness import CHAT, gateway_on, scored, until

EVERYTHING = 1e12  # a moment after all others


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        yield opened


async def add(store, session, *, score=1.0, trained=False, at=1.0):
    await store.add_turn(turn(f"{session}-{at}", session=session, at=at))
    if score is not None:
        await store.add_report(Report(f"{session}-{at}", score, session=session))
    if trained:
        lease = await store.lease(Wish(limit=1000))
        await store.ack(lease.id)


async def sessions(store):
    query = text("SELECT session FROM turns UNION SELECT session FROM trajectories")
    return sorted(await store.read(lambda c: list(c.scalars(query))))


async def remove_all(store, limit):
    found = []
    while names := await store.remove_some(limit):
        found += names
    return found


def test_only_what_was_trained_on_goes(store, run_async):
    async def work():
        await add(store, "trained", trained=True)
        await add(store, "scored")
        await add(store, "unscored", score=None)
        await add(store, "bad", score=None)
        await store.add_turn(turn("lost", session="lost", state="failed"))
        removed = await remove_all(store, Limit(EVERYTHING, None, EVERYTHING))
        counted = await store.read(lambda c: dict(c.execute(text("SELECT name, value FROM counters")).all()))
        return removed, await sessions(store), await store.counts(), await store.read(scanned), counted

    removed, left, counts, scan, counted = run_async(work())
    assert removed == ["trained"]
    assert left == ["bad", "lost", "scored", "unscored"]
    assert counts["removed"] == {"turns": 1, "sessions": 1, "trained": 1}
    assert {k: v for k, v in counted.items() if v and not k.startswith("removed:")} == dict(scan)


@pytest.mark.parametrize("what", ["waits", "leased", "ran out", "trained later", "turn since"])
def test_a_session_goes_as_one_or_not_at_all(store, run_async, what):
    """Of two branches that a score names, one was trained on."""

    async def work():
        for branch in "ab":
            await store.add_turn(turn(branch, at=1.0))
            await store.add_report(Report(branch, 1.0, receipts=(branch,)))
        await store.ack((await store.lease(Wish(limit=1))).id)
        between = time.time()
        if what in ("leased", "ran out"):
            await store.lease(Wish(lease_s=600 if what == "leased" else -1))
        if what in ("trained later", "turn since"):
            await store.ack((await store.lease(Wish())).id)
        if what == "turn since":
            await store.add_turn(turn("c", at=9.0))
        limit = Limit(between if what == "trained later" else EVERYTHING, None, 5.0)
        kept = await remove_all(store, limit), await remove_all(store, replace(limit, trained_before=None, most=0))
        if what == "trained later":  # by age too early; too large it was, and nothing else was in the way
            return kept[0], kept[1] == ["s"]
        return [*kept[0], *kept[1]], await sessions(store) == ["s"]

    assert run_async(work()) == ([], True)


def test_the_largest_store_is_cut_where_it_was_trained_on_first(store, run_async):
    async def work():
        for i in range(2 * AT_ONCE):
            await add(store, f"s{i:02d}", trained=True)
        size = (await store.counts())["bytes"]
        most = size * 3 // 4
        removed = await remove_all(store, Limit(None, most, EVERYTHING))
        return removed, (await store.counts())["bytes"], most, await remove_all(store, Limit(None, most, EVERYTHING))

    removed, size, most, again = run_async(work())
    assert removed == [f"s{i:02d}" for i in range(AT_ONCE // 2)]
    assert size <= most
    assert again == []


def test_keys_of_removed_answers_may_be_used_again(store, run_async):
    async def work():
        await store.add_turn(replace(turn("a", session="s"), key="k", request="r", answer="{}"))
        await store.add_turn(replace(turn("alone", session="alone"), key="k", request="r", answer="{}"))
        for session in ("s", "alone"):
            await store.add_report(Report(session, 1.0, session=session))
        await store.ack((await store.lease(Wish())).id)
        there = [await store.answer(session, "r", "k") for session in ("s", "")]
        await remove_all(store, Limit(EVERYTHING, None, EVERYTHING))
        return there, [await store.answer(session, "another", "k") for session in ("s", "")]

    there, gone = run_async(work())
    assert None not in there
    assert gone == [None, None]


def test_a_plan_that_touches_only_what_was_trained_on(store, run_async):
    if not store._database.is_sqlite:
        pytest.skip("PostgreSQL scans small tables whatever their indexes; its plans say nothing here")

    async def work():
        asked = []
        listening = store._database.reading, "before_cursor_execute"
        event.listen(*listening, lambda c, cursor, sql, values, *_: asked.append((sql, values)))
        await store.read(lambda c: remove_some(c, Limit(1.0, None, 1.0)))
        sql, values = asked[0]
        return await store.read(lambda c: c.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all())

    told = [row[-1] for row in run_async(work())]
    assert not [line for line in told if line.startswith("SCAN")], told


def test_a_gateway_forgets_what_was_removed(tmp_path, run_async):
    """A conversation that goes on afterwards begins anew, also where the gateway had it in memory."""

    async def work():
        async with gateway_on(tmp_path, "yes", config={"keep_trained_s": 0}) as (client, gateway, _):
            first = await scored(client, 1, x_reef_session="s")
            batch = (await client.post("/reef/batches", {"limit": 1}))[1]
            assert (await client.get(f"/reef/turns/{first}"))[0] == 200
            await client.post(f"/reef/batches/{batch['lease']}/ack", {})
            while (await client.get(f"/reef/turns/{first}"))[0] == 200:
                await until(lambda: "s" not in gateway.plane.sessions._sessions)
            again = await client.post(f"/reef/batches/{batch['lease']}/ack", {})
            messages = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "more"},
            ]
            status, answer = await client.post(
                "/v1/chat/completions", {**CHAT, "messages": messages}, x_reef_session="s"
            )
            return again[0], status, answer["reef"], await gateway.store.turn(answer["reef"]["receipt"])

    again, status, reef, stored = run_async(work())
    assert (again, status) == (200, 200)
    assert reef["trajectory"] == 0
    assert stored["parent"] is None


def test_by_default_everything_is_kept(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            receipt = await scored(client, 1)
            batch = (await client.post("/reef/batches", {"limit": 1}))[1]
            await client.post(f"/reef/batches/{batch['lease']}/ack", {})
            return (await client.get(f"/reef/turns/{receipt}"))[0], (await gateway.store.counts())["removed"]["turns"]

    assert run_async(work()) == (200, 0)
