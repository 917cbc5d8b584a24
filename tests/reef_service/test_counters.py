"""The page's numbers are kept as rows are written, and are those of the tables."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest
from sqlalchemy import event, text

from reef_service.store import LeaseGone, UnknownLease, UnknownReceipts, open_store
from reef_service.store.counters import read_counts, scanned
from reef_service.store.leases import Wish
from reef_service.store.reports import Report
from reef_service.store.retention import Limit
from tests.reef_service.examples import turn
from tests.reef_service.old_stores import to_layout_1, to_layout_2

STATES = ("complete", "complete", "complete", "spliced", "disconnected", "failed")


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        yield opened


async def kept(store):
    found = await store.read(lambda c: dict(c.execute(text("SELECT name, value FROM counters")).all()))
    return {name: value for name, value in found.items() if value and not name.startswith("removed:")}


async def do_something(store, rng, number, receipts, leases):
    """One of all operations that change what is counted, with what is there or with what isn't."""
    what = rng.choice(
        ["turn"] * 8 + ["report"] * 6 + ["mark", "release", "saved", "run out"] + ["lease", "ack"] * 3 + ["remove"]
    )
    if what == "turn":
        parent, session = rng.choice([(None, f"s{number}"), *receipts[-4:]])
        state, versions = rng.choice(STATES), rng.choice([("v0",), ("v0", "v1")])
        await store.add_turn(
            turn(f"r{number}", session=session, parent=parent, state=state, versions=versions, at=float(number))
        )
        receipts.append((f"r{number}", session))
    elif what in ("report", "mark"):
        score = rng.random() if what == "report" else None
        about = {"session": rng.choice([("", "nobody's"), *receipts])[1]}
        if receipts and rng.random() < 0.7:
            about = {"receipts": tuple({rng.choice(receipts)[0] for _ in range(3)})}
        await store.add_report(Report(f"report-{number}", score, train=what == "report", **about))
    elif what == "lease":
        step = {"job": "j", "step": number} if rng.random() < 0.5 else {}
        lease = await store.lease(Wish(limit=rng.randrange(1, 4), **step))
        leases += [lease.id] * len(lease.samples)
    elif what == "saved":
        await store.saved("j", rng.randrange(number + 1), None)
    elif what == "remove":
        await store.remove_some(Limit(time.time() + 1, None, float(number)))
    elif what == "run out":
        await store.writer.write(
            lambda c: c.execute(text("UPDATE trajectories SET lease_ends = 1 WHERE lease_ends > 1"))
        )
    else:
        await getattr(store, what)(rng.choice([*leases[-6:], "nobody's"]))


@pytest.mark.parametrize("seed", range(6))
def test_counters_are_what_a_scan_finds(store, run_async, seed):
    async def work():
        rng, receipts, leases, seen = random.Random(seed), [], [], set()
        for number in range(120):
            with suppress(LeaseGone, UnknownLease, UnknownReceipts):
                await do_something(store, rng, number, receipts, leases)
            found = await kept(store)
            assert found == dict(await store.read(scanned))
            seen |= set(found)
        return seen

    seen = run_async(work())
    assert {"trajectories", "sessions", "scored", "trained", "turn:failed:", "turn:complete:pure"} <= seen


def test_what_is_refused_counts_nothing(store, run_async):
    async def work():
        await store.add_turn(turn("a"))
        with pytest.raises(Exception, match=r"UNIQUE|unique"):
            await store.add_turn(turn("a", session="other"))
        return await kept(store)

    assert run_async(work()) == {"turn:complete:pure": 1, "trajectories": 1, "sessions": 1, "bytes": 248}


def test_failed_turns_are_not_unproven(store, run_async):
    async def work():
        for receipt, state in (("a", "complete"), ("b", "spliced"), ("c", "disconnected"), ("d", "failed")):
            await store.add_turn(turn(receipt, session=receipt, state=state))
        return await store.counts()

    counts = run_async(work())
    assert counts["classes"] == {"pure": 1, "unproven": 1}
    assert counts["states"] == {"complete": 1, "spliced": 1, "disconnected": 1, "failed": 1}


def test_leases_that_ran_out_are_counted_apart(store, run_async):
    async def work():
        for receipt in "abc":
            await store.add_turn(turn(receipt, session=receipt))
            await store.add_report(Report(receipt, 1.0, session=receipt))
        await store.lease(Wish(limit=1))
        await store.lease(Wish(limit=2, lease_s=-1.0))
        return await store.counts()

    counts = run_async(work())
    assert (counts["leased"], counts["expired"]) == (1, 2)
    assert (counts["leases"], counts["leases_expired"]) == (1, 1)


def test_the_page_scans_no_table(store, run_async):
    """Whatever is asked for the page is answered by an index or from the counters."""

    async def work():
        asked = []
        engine = store._database.reading
        event.listen(engine, "before_cursor_execute", lambda c, cursor, sql, values, *_: asked.append((sql, values)))
        await store.counts()
        plans = {}
        for sql, values in list(asked):
            plans[sql] = await store.read(
                lambda c, s=sql, v=values: c.exec_driver_sql(f"EXPLAIN QUERY PLAN {s}", v).all()
            )
        return plans

    if not store._database.is_sqlite:
        pytest.skip("PostgreSQL scans small tables whatever their indexes; its plans say nothing here")
    plans = run_async(work())
    assert len(plans) == 5
    for sql, plan in plans.items():
        told = " ".join(row[-1] for row in plan)
        assert "counters" in sql or ("SEARCH" in told and "SCAN" not in told), (sql, told)


@pytest.mark.parametrize("to_older", [to_layout_1, to_layout_2])
def test_an_older_store_is_counted_once(store_url, run_async, to_older):
    async def fill(store):
        for i, state in enumerate(STATES):
            await store.add_turn(turn(f"r{i}", session=f"s{i % 4}", state=state, at=float(i)))
        await store.add_report(Report("r", 1.0, session="s0"))
        await store.ack((await store.lease(Wish(limit=1))).id)
        return await store.counts()

    with open_store(store_url) as store:
        before = run_async(fill(store))
    to_older(store_url)
    for _ in range(2):
        with open_store(store_url) as store:
            assert run_async(store.counts()) == before
            assert run_async(kept(store)) == dict(run_async(store.read(scanned)))
            assert run_async(store.read(read_counts)) == before
