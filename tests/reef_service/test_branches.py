"""Groups count sessions, and of a session's branches one trains: on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text, update

from reef_service.store import LeaseGone, StoreError, migrations, open_store, schema
from reef_service.store.leases import Wish
from reef_service.store.reports import Report
from reef_service.store.schema import trajectories
from tests.reef_service.examples import turn
from tests.reef_service.old_stores import to_layout_1


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        yield opened


async def score(store, session, value=1.0, **report):
    return await store.add_report(Report(f"r-{session}-{time.time_ns()}", value, session=session, **report))


async def group_of(store, label, sessions, **options):
    """One session after the other, with one turn and a score."""
    for session in sessions:
        await store.add_turn(turn(f"{session}-0", session=session, label=label, **options))
        await score(store, session)


async def given(store, **wish):
    return [f"{session}/{number}" for session, number in (await store.lease(Wish(**wish))).samples]


def test_a_group_is_of_sessions_whatever_else_they_asked(store, run_async):
    """A retry after a lost answer, a sub-agent, and a request for a title; a group of trajectories had these."""

    async def work():
        for session in ("s0", "s1"):
            await store.add_turn(turn(f"{session}-title", session=session, label="q", prompt=(9,), output=(9,)))
            await store.add_turn(turn(f"{session}-0", session=session, label="q", prompt=(1, 2), output=(3,), at=2.0))
            await store.add_turn(turn(f"{session}-sub", session=session, label="q", prompt=(7,) * 50, at=2.5))
            for name, at in (("lost", 3.0), ("retry", 4.0)):
                await store.add_turn(
                    turn(f"{session}-{name}", session=session, label="q", prompt=(1, 2, 3, 4), output=(5,) * 9 if
                         name == "lost" else (6,), parent=f"{session}-0", at=at)
                )  # fmt: skip
            await score(store, session)
        lease = await store.lease(Wish(group_size=2))
        return await store.samples(lease), await given(store, group_size=2), await given(store)

    samples, again, others = run_async(work())
    assert [(s.session, s.turns[-1].receipt) for s in samples] == [("s0", "s0-retry"), ("s1", "s1-retry")]
    assert (again, others) == ([], [])


def test_the_branch_that_the_score_names_trains(store, run_async):
    async def work():
        for session in ("s0", "s1"):
            await store.add_turn(turn(f"{session}-a", session=session, label="q", prompt=(1,), output=(2,)))
            await store.add_turn(turn(f"{session}-b", session=session, label="q", prompt=(1,) * 9, output=(2,)))
        await store.add_report(Report("r0", 1.0, receipts=("s0-a",)))
        await score(store, "s1")
        return await given(store, group_size=2)

    assert run_async(work()) == ["s0/0", "s1/1"]


def test_the_last_score_decides(store, run_async):
    """A score of a turn, then one of all that the session came to."""

    async def work():
        await store.add_turn(turn("a", prompt=(1,), output=(2,), label="q"))
        await store.add_report(Report("early", 0.1, receipts=("a",)))
        placed = await store.add_turn(turn("b", prompt=(1, 2, 3), output=(4,), parent="a", at=2.0, label="q"))
        assert placed.trajectory == 1
        await score(store, "s", 0.9)
        return await store.samples(await store.lease(Wish(group_size=1)))

    (sample,) = run_async(work())
    assert (sample.trajectory, sample.score) == (1, 0.9)


@pytest.mark.parametrize("how", ["request", "report"])
def test_a_marked_branch_is_never_trained_on(store, run_async, how):
    async def work():
        await store.add_turn(turn("a", prompt=(1,), output=(2,), label="q"))
        long = turn("b", prompt=(1, 2, 3), output=(4,), parent=None, label="q")
        await store.add_turn(turn("c", prompt=(1, 2, 3, 4, 5), output=(6,), label="q", train=how != "request"))
        await store.add_turn(long)
        if how == "report":
            outcome = await store.add_report(Report("mark", receipts=("c",), train=False))
            assert outcome["trajectories"] == 1
        await score(store, "s")
        return await given(store, group_size=1), await given(store)

    assert run_async(work()) == (["s/2"], [])


def test_a_session_that_is_with_a_trainer_gives_no_second_sample(store, run_async):
    async def work():
        await group_of(store, "q", ["s"])
        lease = await store.lease(Wish(group_size=1))
        await store.add_turn(turn("more", prompt=(1,) * 50, output=(2,), label="q", at=9.0))
        await score(store, "s")
        assert await given(store, group_size=1) == []
        await store.ack(lease.id)
        await score(store, "s")
        return await given(store, group_size=1), await given(store)

    assert run_async(work()) == ([], [])


def test_a_lease_that_ran_out_loses_a_branch_that_no_longer_trains(store, run_async):
    async def work():
        await group_of(store, "q", ["s"])
        old = await store.lease(Wish(group_size=1, lease_s=0.01))
        await store.writer.write(lambda c: c.execute(update(trajectories).values(lease_ends=1.0)))
        await store.add_turn(turn("longer", prompt=(1,) * 50, output=(2,), label="q", at=9.0))
        await score(store, "s")
        assert await given(store, group_size=1) == ["s/1"]
        with pytest.raises(LeaseGone):
            await store.ack(old.id)

    run_async(work())


@pytest.mark.timeout(300)
def test_incomplete_groups_never_stand_in_front_of_complete_ones(store, run_async):
    """One agent of each of 586 groups never reported: 4102 scored samples that make no group."""

    async def work():
        for group in range(586):
            await asyncio.gather(
                *(store.add_turn(turn(f"i{group}-{i}", session=f"i{group}-{i}", label=f"i{group}")) for i in range(7))
            )
            await asyncio.gather(*(score(store, f"i{group}-{i}") for i in range(7)))
        for group in range(4):
            await group_of(store, f"whole{group}", [f"w{group}-{i}" for i in range(8)])
        lease = await store.lease(Wish(group_size=8, limit=4))
        listed = await store.incomplete_groups(8, 1000)
        closed = await store.close_groups(8, ["i0", "i1"], 0)
        return lease.samples, listed, closed, await store.incomplete_groups(8, 1000)

    samples, listed, closed, left = run_async(work(), 250)
    assert [session for session, _ in samples] == [f"w{g}-{i}" for g in range(4) for i in range(8)]
    assert len(listed) == 586
    assert {k: listed[0][k] for k in ("label", "sessions", "scored", "ready", "trained", "leased")} == {
        "label": "i0", "sessions": 7, "scored": 7, "ready": 7, "trained": 0, "leased": 0,
    }  # fmt: skip
    assert closed == {"i0": 7, "i1": 7}
    assert len(left) == 584


def test_a_closed_group_is_given_to_nobody_and_its_label_may_come_again(store, run_async):
    async def work():
        await group_of(store, "q", ["a", "b"])
        await group_of(store, "done", ["x", "y", "z"])
        await store.add_turn(turn("late", session="c", label="q"))  # not scored yet
        assert await store.close_groups(3, None, 3600) == {}  # they had a score a moment ago
        assert await store.close_groups(3, None, 0) == {"q": 3}  # and not the complete one
        await score(store, "c")
        await store.add_turn(turn("a-2", session="a", label="q", prompt=(1,) * 20))
        await score(store, "a")
        assert await given(store, group_size=3) == ["x/0", "y/0", "z/0"]
        assert await given(store) == []
        await group_of(store, "q", ["d", "e", "f"])
        return await given(store, group_size=3)

    assert run_async(work()) == ["d/0", "e/0", "f/0"]


def test_a_group_waits_for_its_members_and_nothing_less_than_asked_is_given(store, run_async):
    async def work():
        await group_of(store, "q", ["a", "b"])
        assert await given(store, group_size=2, limit=2, at_least=2) == []
        await group_of(store, "p", ["c"])
        assert await given(store, group_size=2, limit=2, at_least=2) == []
        await group_of(store, "p", ["d"])
        return await given(store, group_size=2, limit=2, at_least=2)

    assert run_async(work()) == ["a/0", "b/0", "c/0", "d/0"]


def test_a_lease_belongs_to_one_job(store, run_async):
    async def work():
        await group_of(store, "", ["a", "b", "c"])
        mine = await store.lease(Wish(job="one", step=0, limit=1))
        theirs = await store.lease(Wish(job="two", step=0, limit=1))
        assert not set(mine.samples) & set(theirs.samples)
        with pytest.raises(LeaseGone, match="belongs to job 'one'"):
            await store.lease(Wish(id=mine.id, limit=1))
        for use in (store.ack, store.release):
            with pytest.raises(LeaseGone, match="belongs to job 'one'"):
                await use(mine.id, "two")
        assert await store.saved("two", 0, None) == {
            "acknowledged": [theirs.id], "trained": 1, "gone": [], "held": [],
        }  # fmt: skip
        assert [lease["id"] for lease in await store.job_leases("one")] == [mine.id]
        return await store.job_leases("two")

    assert run_async(work()) == []


def test_a_step_that_lost_its_lease_gets_another(store, run_async):
    async def work():
        await group_of(store, "", ["a", "b", "c"])
        first = await store.lease(Wish(job="j", step=3, limit=2))
        assert (await store.lease(Wish(job="j", step=3, limit=2))).samples == first.samples
        await store.writer.write(lambda c: c.execute(update(trajectories).values(lease_ends=1.0)))
        other = await store.lease(Wish(job="k", step=0, limit=1))  # one of the two
        second = await store.lease(Wish(job="j", step=3, limit=2))
        assert second.id != first.id
        assert not set(second.samples) & set(other.samples)
        found = await store.saved("j", 3, None)
        assert (found["acknowledged"], found["trained"], found["gone"]) == ([second.id], 2, [])
        return await store.saved("j", 3, None)

    assert run_async(work())["trained"] == 0


def test_a_saved_step_whose_lease_was_given_away_keeps_what_is_its_own(store, run_async):
    async def work():
        await group_of(store, "", ["a", "b"])
        lease = await store.lease(Wish(job="j", step=0, limit=2))
        await store.writer.write(lambda c: c.execute(update(trajectories).values(lease_ends=1.0)))
        await store.lease(Wish(job="k", step=0, limit=1))
        found = await store.saved("j", 0, None)
        assert (found["trained"], found["gone"]) == (1, [lease.id])
        return await store.saved("j", 0, None)

    assert run_async(work())["gone"] == []


async def fill(store):
    await store.add_turn(turn("a", prompt=(1,), output=(2,), label="q"))
    await store.add_turn(turn("lost", prompt=(1, 2, 3), output=(4,), parent="a", at=2.0, label="q"))
    await store.add_turn(turn("retry", prompt=(1, 2, 3), output=(5,), parent="a", at=3.0, label="q"))
    await store.add_turn(turn("long", prompt=(1,) * 30, output=(5,), at=4.0, label="q"))
    await store.add_turn(turn("taken", session="t", label="q"))
    penalised = turn("penalised", session="u", label="q")
    record = replace(penalised.record, sampling={"frequency_penalty": 0.5})
    await store.add_turn(replace(penalised, record=record))
    for session in "st":
        await score(store, session)
    return await store.lease(Wish(id="old", limit=1, group_size=1))


def test_a_store_of_the_first_layout_is_brought_to_this_one(store_url, run_async, monkeypatch):
    with open_store(store_url) as store:
        first = run_async(fill(store))
    to_layout_1(store_url)

    with monkeypatch.context() as broken:  # killed in the middle: it is as it was
        broken.setattr(migrations, "_fill_depths", lambda connection: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_store(store_url).__enter__()

    async def work(store):
        others = await given(store, group_size=1)
        assert await store.ack("old") == 1
        await store.add_turn(turn("more", prompt=(1, 2, 3, 5, 6), output=(7,), parent="retry", at=5.0))
        return others, await store.saved("j", 0, None)

    with open_store(store_url) as store:
        others, nothing = run_async(work(store))
        found = "SELECT receipt, class FROM turns WHERE receipt IN ('a', 'penalised')"
        classes = run_async(store.read(lambda c: dict(c.execute(text(found)).all())))
        depths = run_async(store.read(lambda c: dict(c.execute(text("SELECT receipt, depth FROM turns")).all())))
    assert sorted([*(f"{s}/{n}" for s, n in first.samples), *others]) == ["s/1", "t/0"]
    assert nothing["trained"] == 0
    assert depths == {"a": 1, "lost": 2, "retry": 2, "long": 1, "taken": 1, "penalised": 1, "more": 3}
    assert classes == {"penalised": "not_auditable", "a": "pure"}
    with open_store(store_url):  # and it stays
        pass


@pytest.mark.parametrize("layout", ["0", str(schema.LAYOUT + 1), "x"])
def test_a_store_of_an_unknown_layout_is_refused_and_left_alone(store_url, layout):
    with open_store(store_url):
        pass
    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE meta SET value = :layout WHERE name = 'layout'"), {"layout": layout})
    for _ in range(2):
        with pytest.raises(StoreError, match=f"has layout {layout}, this version writes {schema.LAYOUT}"):
            open_store(store_url).__enter__()
    engine.dispose()
