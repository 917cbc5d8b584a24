"""The store, on SQLite and on PostgreSQL: what is written is there afterwards, and every sample is trained on once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from reef_service.store import LeaseGone, ReportConflict, StoreError, UnknownLease, UnknownReceipts, open_store
from reef_service.store.leases import Wish
from reef_service.store.reports import Report
from slime_backend.wire import KvSegment, Span
from tests.reef_service.examples import turn


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        yield opened


async def scored(store, receipt, score=1.0, **options):
    await store.add_turn(turn(receipt, **options))
    await store.add_report(Report(f"report-{receipt}", score, receipts=(receipt,)))


def test_a_turn_comes_back_as_it_was(store, run_async):
    given = turn("a", output=(5, 6, 7, 8), versions=("v0", "v1"))

    async def work():
        await store.add_turn(given)
        return await store.turn("a"), await store.tokens("a"), await store.turn("b")

    found, tokens, nothing = run_async(work())
    assert found["class"] == "mixed"
    assert found["logprobs"] == given.record.logprobs
    assert tokens == [1, 2, 3, 5, 6, 7, 8]
    assert nothing is None
    (record,) = store.records()
    assert record.to_json() == {**given.record.to_json(), "group": "s"}


def test_contexts_of_a_turn_that_carried_its_kv_come_back_whole(store, run_async):
    """What its segments' contexts begin with alike is stored once."""
    given = turn("a", prompt=(1, 2, 3), output=(5, 6, 7, 8))
    segments = (
        KvSegment(0, 2, "v0", (Span("v0", 0, 4),)),
        KvSegment(2, 3, "v1", (Span("v0", 0, 4), Span("v1", 4, 5))),
        KvSegment(3, 4, "v2", (Span("v0", 0, 4), Span("v1", 4, 5), Span("v2", 5, 6))),
    )
    spans = (Span("v0", 0, 2), Span("v1", 2, 3), Span("v2", 3, 4))
    given = replace(given, record=replace(given.record, segments=segments, spans=spans))

    async def work():
        await store.add_turn(given)
        return await store.turn("a")

    found = run_async(work())
    assert found["class"] == "carried"
    assert found["segments"] == [segment.to_json() for segment in segments]
    (record,) = store.records()
    assert record.segments == segments


def test_it_is_there_after_reopening_and_nobody_else_may_open_it(store_url, run_async):
    with open_store(store_url) as store:
        run_async(scored(store, "a"))
        with pytest.raises(StoreError, match="another gateway writes to"):
            open_store(store_url).__enter__()
    with open_store(store_url) as store:
        assert [r.receipt for r in store.records()] == ["a"]
        assert run_async(store.lease(Wish())).samples == (("s", 0),)


def test_turns_of_a_conversation_are_one_sample(store, run_async):
    async def work():
        await store.add_turn(turn("a", prompt=(1, 2), output=(10, 11)))
        # 3 and 4 are what the user wrote in between
        placed = await store.add_turn(turn("b", prompt=(1, 2, 10, 11, 3, 4), output=(12,), parent="a", at=2.0))
        assert placed.trajectory == 0
        await store.add_report(Report("r", 0.5, session="s"))
        return await store.samples(await store.lease(Wish()))

    (sample,) = run_async(work())
    assert sample.prompt_ids == [1, 2]
    assert sample.response_ids == [10, 11, 3, 4, 12]
    assert sample.mask == [1, 1, 0, 0, 1]
    assert sample.logprobs == [-0.25, -0.5, 0.0, 0.0, -0.25]
    assert (sample.score, [r.receipt for r in sample.turns]) == (0.5, ["a", "b"])


def test_branches_are_kept_and_no_token_is_in_two_masks(store, run_async):
    async def work():
        await store.add_turn(turn("a", prompt=(1,), output=(10,)))
        first = await store.add_turn(turn("b", prompt=(1, 10, 2), output=(11,), parent="a", at=2.0))
        second = await store.add_turn(turn("c", prompt=(1, 10, 2), output=(12,), parent="a", at=3.0))
        assert (first.trajectory, first.forked) == (0, False)
        assert (second.trajectory, second.forked) == (1, True)
        await store.add_report(Report("r", 1.0, receipts=("b", "c")))
        return await store.samples(await store.lease(Wish()))

    one, two = run_async(work())
    assert (one.prompt_ids, one.response_ids, one.mask) == ([1], [10, 2, 11], [1, 0, 1])
    assert (two.prompt_ids, two.response_ids, two.mask) == ([1, 10, 2], [12], [1])


def test_a_scored_trajectory_takes_no_further_turn(store, run_async):
    async def work():
        await scored(store, "a", output=(10,), prompt=(1,))
        placed = await store.add_turn(turn("b", prompt=(1, 10), output=(11,), parent="a", at=2.0))
        return placed

    assert run_async(work()).trajectory == 1


@pytest.mark.parametrize("state", ["disconnected", "failed"])
def test_what_the_client_never_got_is_in_no_trajectory(store, run_async, state):
    async def work():
        placed = await store.add_turn(turn("a", state=state))
        outcome = await store.add_report(Report("r", 1.0, receipts=("a",)))
        return placed, outcome, await store.history("s"), await store.lease(Wish())

    placed, outcome, history, lease = run_async(work())
    assert placed.trajectory == -1
    assert outcome["trajectories"] == 0
    assert history == []
    assert lease.samples == ()


def test_incomplete_provenance_is_kept_but_not_trained_on(store, run_async):
    async def work():
        await scored(store, "a", state="spliced")
        return await store.history("s"), await store.lease(Wish()), await store.counts()

    history, lease, counts = run_async(work())
    assert [receipt for receipt, _, _ in history] == ["a"]
    assert lease.samples == ()
    assert counts["classes"] == {"unproven": 1}


def test_a_session_goes_on_behind_a_turn_of_unknown_class(store, run_async):
    """A spliced turn has no class; neither has a trajectory with one, whichever of its turns it is."""

    async def work():
        await store.add_turn(turn("a", prompt=(1,), output=(10,), state="spliced"))
        after = await store.add_turn(turn("b", prompt=(1, 10, 2), output=(11,), parent="a", at=2.0))
        await store.add_turn(turn("c", session="t", prompt=(1,), output=(10,)))
        before = await store.add_turn(
            turn("d", session="t", prompt=(1, 10, 2), output=(11,), parent="c", at=3.0, state="spliced")
        )
        for session in "st":
            await store.add_report(Report(f"r{session}", 1.0, session=session))
        kept = [(await store.turn(receipt))["output_ids"] for receipt in "abcd"]
        return after, before, kept, await store.lease(Wish())

    after, before, kept, lease = run_async(work())
    assert (after.trajectory, after.forked) == (before.trajectory, before.forked) == (0, False)
    assert [list(ids) for ids in kept] == [[10], [11], [10], [11]]
    assert lease.samples == ()


def test_a_report_sent_twice_is_one_report(store, run_async):
    async def work():
        await store.add_turn(turn("a"))
        first = await store.add_report(Report("r", 0.5, receipts=("a",)))
        again = await store.add_report(Report("r", 0.5, receipts=("a",)))
        assert first == again == {"id": "r", "trajectories": 1, "late": []}
        with pytest.raises(ReportConflict, match="'r' is stored with other contents"):
            await store.add_report(Report("r", 0.75, receipts=("a",)))
        with pytest.raises(UnknownReceipts, match="no turn is stored under b, c"):
            await store.add_report(Report("q", 0.75, receipts=("a", "b", "c")))
        with pytest.raises(UnknownReceipts, match="no turn is stored in session 'z'"):
            await store.add_report(Report("q", 0.75, session="z"))

    run_async(work())


def test_a_refused_operation_costs_its_neighbours_nothing(store, run_async):
    async def work():
        reports = [Report(str(i), 1.0, receipts=("a" if i % 2 else "gone",)) for i in range(40)]
        await store.add_turn(turn("a"))
        results = await asyncio.gather(*(store.add_report(r) for r in reports), return_exceptions=True)
        assert [isinstance(r, UnknownReceipts) for r in results] == [i % 2 == 0 for i in range(40)]

    run_async(work())


def test_many_writes_share_a_commit(store, run_async):
    async def work():
        before = store.writer.commits
        await asyncio.gather(*(store.add_turn(turn(str(i), session=f"s{i}")) for i in range(64)))
        return store.writer.commits - before

    assert run_async(work()) < 16


def test_nothing_is_leased_twice_and_an_acknowledged_sample_never_again(store, run_async):
    async def work():
        for name in "abcd":
            await scored(store, name, session=name)
        one, two = await store.lease(Wish(limit=2)), await store.lease(Wish(limit=9))
        assert {s for s, _ in one.samples} | {s for s, _ in two.samples} == set("abcd")
        assert not set(one.samples) & set(two.samples)
        assert (await store.lease(Wish())).samples == ()
        assert await store.ack(one.id) == 2
        assert await store.ack(one.id) == 2  # the answer was lost: the trainer asks again
        assert await store.release(one.id) == 0
        assert await store.release(two.id) == 2
        with pytest.raises(LeaseGone, match="was given back"):
            await store.ack(two.id)
        with pytest.raises(UnknownLease, match="no lease 'x'"):
            await store.ack("x")
        return await store.lease(Wish())

    assert {s for s, _ in run_async(work()).samples} == set("cd")


def test_a_lease_that_ran_out_is_given_again_and_its_late_holder_is_told(store, run_async):
    async def work():
        await scored(store, "a")
        dead = await store.lease(Wish(lease_s=0.05))
        await asyncio.sleep(0.1)  # longer than the lease
        again = await store.lease(Wish())
        assert again.samples == dead.samples
        with pytest.raises(LeaseGone, match="1 of its 1 samples are no longer its own"):
            await store.ack(dead.id)
        assert await store.ack(again.id) == 1

        await scored(store, "b", session="t")
        late = await store.lease(Wish(lease_s=0.05))
        await asyncio.sleep(0.1)  # longer than the lease
        assert await store.ack(late.id) == 1  # nobody else was given it: it was trained on once

    run_async(work())


def test_asking_again_with_the_same_lease_gives_the_same_samples(store, run_async):
    async def work():
        for name in "ab":
            await scored(store, name, session=name)
        first = await store.lease(Wish(limit=1, id="mine", lease_s=60))
        again = await store.lease(Wish(limit=1, id="mine", lease_s=120))
        assert again.samples == first.samples
        assert again.ends_at > first.ends_at  # renewed
        await store.ack("mine")
        with pytest.raises(LeaseGone, match="was acknowledged"):
            await store.lease(Wish(id="mine"))

    run_async(work())


def test_a_score_that_comes_too_late_changes_nothing_and_is_told(store, run_async):
    async def work():
        await scored(store, "a", score=0.5)
        lease = await store.lease(Wish())
        outcome = await store.add_report(Report("late", 0.9, receipts=("a",)))
        return outcome, await store.samples(lease)

    outcome, (sample,) = run_async(work())
    assert outcome == {"id": "late", "trajectories": 0, "late": [{"session": "s", "trajectory": 0}]}
    assert sample.score == 0.5


def test_samples_are_chosen_by_score_class_and_age(store, run_async):
    async def work():
        assert await store.add_publication("v0", "found") == 1
        assert await store.add_publication("v1", "resumed", checkpoint="x") == 2
        await scored(store, "old", session="old", score=0.1)
        await scored(store, "mixed", session="mixed", score=0.5, versions=("v0", "v1"))
        await scored(store, "new", session="new", score=0.9, versions=("v1",))
        found = {}
        for name, wish in {
            "all": Wish(),
            "score": Wish(min_score=0.4, max_score=0.6),
            "class": Wish(classes=("pure",)),
            "age": Wish(oldest=2),
        }.items():
            lease = await store.lease(wish)
            found[name] = {s for s, _ in lease.samples}
            await store.release(lease.id) if lease.samples else None
        return found

    assert run_async(work()) == {
        "all": {"old", "mixed", "new"},
        "score": {"mixed"},
        "class": {"old", "new"},
        "age": {"new"},
    }


def test_groups_come_whole(store, run_async):
    async def work():
        for name, label in (("a", "q1"), ("b", "q1"), ("c", "q2"), ("d", "")):
            await scored(store, name, session=name, label=label)
        lease = await store.lease(Wish(group_size=2))
        return await store.samples(lease), await store.lease(Wish(group_size=2))

    samples, nothing = run_async(work())
    assert [(s.session, s.label) for s in samples] == [("a", "q1"), ("b", "q1")]
    assert nothing.samples == ()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nonsense", "store='nonsense' is no database address"),
        ("sqlite://", "can't live in memory"),
        ("oracle9://u:secret@h/d", "its driver is not installed"),
        ("postgresql+psycopg://u:secret@127.0.0.1:1/d", "can't be opened"),
    ],
)
def test_a_bad_address_is_one_line_without_its_password(url, expected):
    if "psycopg" in url:
        pytest.importorskip("psycopg", reason="psycopg is not installed; pip install 'reef-slime[postgres]'")
    with pytest.raises(StoreError, match=expected) as refused:
        open_store(url).__enter__()
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
