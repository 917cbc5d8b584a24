"""Every rank of a trainer publishing together: the ranks are threads, the engines fake ones, what is sent is a name."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_backend.slime_hooks.weights.errors import EngineRejectedUpdate, PublicationFailed
from slime_backend.slime_hooks.weights.ranks import publish_together
from slime_backend.transports.collective import CollectiveTransport
from slime_backend.wire import REPORTS_PATH
from tests.fake_fleet import FAST
from tests.slime_hooks.publishing import engines_and_publisher

WAIT_S = 30.0  # a rank that is left alone in a collective fails the test instead of hanging it


class ThreadRanks:
    """One rank among `size` threads."""

    def __init__(self, rank, size, barrier, slots):
        self.rank, self._size, self._barrier, self._slots = rank, size, barrier, slots

    def gather(self, value):
        self._slots[self.rank] = value
        self._barrier.wait(WAIT_S)
        values = list(self._slots)
        self._barrier.wait(WAIT_S)
        return values

    def share(self, value):
        return self.gather(value)[0]


class StubLeader:
    def __init__(self, publisher, engines, version):
        self.publisher, self.engines, self.version = publisher, engines, version

    def start(self):
        self.publisher.enroll(self.engines)
        transport = CollectiveTransport(self.publisher.loop, deadline_s=5.0)
        return self.publisher.start(transport, self.version), transport

    def finish(self, future):
        return self.publisher.finish(future)


def run_ranks(size, work):
    """`work(ranks)` on each rank at once; their results or errors, in order."""
    barrier, slots = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadRanks(rank, size, barrier, slots)) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]


def sender(publisher, engines, version, refuses=()):
    """What rank 1 does in a round: the only one here that reaches engines. Returns (send, rounds)."""
    rounds = []
    by_name = {e.url.partition("://")[2]: e for e in engines}

    def send(names):
        rounds.append(list(names))
        failed = {}
        for name in names:
            if by_name[name] in refuses:
                failed[name] = "HTTP 400: no"
                continue
            client = publisher.fleet.members[name].client
            publisher.loop.submit(client.take_tensors([version])).result()
        return failed

    return send, rounds


def publish_by_ranks(publisher, engines, version, refuses=(), size=3):
    send, rounds = sender(publisher, engines, version, refuses)

    def work(ranks):
        leader = StubLeader(publisher, engines, version) if ranks.rank == 0 else None
        return publish_together(ranks, leader, send if ranks.rank == 1 else lambda names: {})

    return run_ranks(size, work), rounds


def test_all_ranks_send_while_every_engine_is_paused_and_flushed(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        outcomes, rounds = publish_by_ranks(publisher, engines, "1")
        assert [o["reef/publication/confirmed"] for o in outcomes] == [2, 2, 2]
        assert [len(names) for names in rounds] == [2]
        for engine in engines:
            assert (engine.fake.loaded, engine.fake.label, engine.fake.session_open) == ("1", "1", False)
            order = [c for c in engine.fake.calls if c not in ("/server_info", "/model_info", REPORTS_PATH)]
            assert order == [
                "/weights_checker",
                "/pause_generation",
                "/flush_cache",
                "/begin_weight_update",
                "/update_weights_from_tensor",
                "/end_weight_update",
                "/weights_checker",
                "/update_weight_version",
                "/continue_generation",
            ]


def test_the_others_are_sent_to_again_when_one_engine_rejects_the_update(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        outcomes, rounds = publish_by_ranks(publisher, engines, "1", refuses=[engines[1]])
        assert [o["reef/publication/retired"] for o in outcomes] == [1, 1, 1]
        assert [len(names) for names in rounds] == [2, 1]
        assert router.workers == [engines[0].url]
        assert not engines[1].fake.paused
        assert engines[1].fake.label == "unconfirmed-1"


def test_every_rank_raises_the_same_when_all_engines_reject_it(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        outcomes, _ = publish_by_ranks(publisher, engines, "1", refuses=engines)
        assert {type(o) for o in outcomes} == {EngineRejectedUpdate}
        assert len({str(o) for o in outcomes}) == 1
        assert "HTTP 400: no" in str(outcomes[0])
        assert all(e.url.partition("://")[2] in str(outcomes[0]) for e in engines)
        assert not any(e.fake.paused or e.fake.session_open for e in engines)


def test_an_engine_that_fails_its_flush_is_not_sent_to(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        engines[0].fake.ranks[0].refuse_flush = True
        _, rounds = publish_by_ranks(publisher, engines, "1")
        assert rounds == [[engines[1].url.partition("://")[2]]]
        assert router.workers == [engines[1].url]
        assert engines[0].fake.loaded == "default"


def test_nobody_waits_when_no_engine_can_be_sent_to(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        for engine in engines:
            engine.fake.ranks[0].refuse_flush = True
        outcomes, rounds = publish_by_ranks(publisher, engines, "1")
        assert {type(o) for o in outcomes} == {PublicationFailed}
        assert rounds == []


def test_nobody_waits_when_the_publication_cannot_begin(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        for engine in engines:
            engine.fake.dead = True
        outcomes, _ = publish_by_ranks(publisher, engines, "1")
        assert {type(o) for o in outcomes} == {PublicationFailed}


def test_an_error_of_the_trainer_itself_leaves_no_engine_paused(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):

        def send(names):
            raise MemoryError("gather")

        def work(ranks):
            return publish_together(ranks, StubLeader(publisher, engines, "1"), send)

        assert [type(o) for o in run_ranks(1, work)] == [MemoryError]
        assert not any(e.fake.paused or e.fake.session_open for e in engines)
        assert router.workers == []


def test_a_trainer_that_never_sends_leaves_no_engine_paused(tmp_path):
    with engines_and_publisher(tmp_path, count=1) as (publisher, engines, _):
        publisher.enroll(engines)
        transport = CollectiveTransport(publisher.loop, deadline_s=0.3)
        with pytest.raises(EngineRejectedUpdate, match="the trainer didn't finish sending"):
            publisher.finish(publisher.start(transport, "1"))
        assert not engines[0].fake.paused
        assert not engines[0].fake.session_open


class LateTransport(CollectiveTransport):
    """Somebody awaits something before the load of one engine begins."""

    async def load(self, client, version):
        if client.name == max(self._expected_names):
            await asyncio.sleep(0.05)
        await super().load(client, version)

    def expect_loads(self, clients):
        self._expected_names = [client.name for client in clients]
        super().expect_loads(clients)


class Between:
    """A transport in front of another one, of which it passes on the calls that every transport has."""

    def __init__(self, inner):
        self.inner, self.name = inner, inner.name

    async def prepare(self, version, clients):
        self.last = max(client.name for client in clients)
        await self.inner.prepare(version, clients)

    async def load(self, client, version):
        if client.name == self.last:
            await asyncio.sleep(0.05)
        await self.inner.load(client, version)

    async def close(self):
        await self.inner.close()


@pytest.mark.parametrize("around", [False, True], ids=["a transport that awaits", "one in front of it"])
def test_a_load_that_begins_late_is_sent_to_with_the_others(tmp_path, around):
    """50 ms after the first one; else it would be left out, and wait for the trainer until its deadline."""
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        send, rounds = sender(publisher, engines, "1")

        class Leader(StubLeader):
            def start(self):
                self.publisher.enroll(self.engines)
                inner = (CollectiveTransport if around else LateTransport)(self.publisher.loop, deadline_s=5.0)
                return self.publisher.start(Between(inner) if around else inner, self.version), inner

        def work(ranks):
            leader = Leader(publisher, engines, "1") if ranks.rank == 0 else None
            return publish_together(ranks, leader, send if ranks.rank == 1 else lambda names: {})

        outcomes = run_ranks(3, work)
        assert [o["reef/publication/confirmed"] for o in outcomes] == [2, 2, 2]
        assert [len(names) for names in rounds] == [2]
        assert [engine.fake.loaded for engine in engines] == ["1", "1"]


def test_an_engine_that_cannot_open_a_session_fails_alone(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        engines[0].fake.faults["/begin_weight_update"] = ["refuse"]
        _, rounds = publish_by_ranks(publisher, engines, "1")
        assert rounds == [[engines[1].url.partition("://")[2]]]
        assert router.workers == [engines[1].url]


def test_an_engine_that_hangs_after_a_failed_update_does_not_hold_the_transaction_up(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, _):
        for engine in engines:
            engine.fake.faults["/end_weight_update"] = ["hang_before"]
        fast = FAST.__class__(pause=1.0, flush=1.0, load=300.0, control=1.0)
        publisher._deadlines = fast
        outcomes, _ = publish_by_ranks(publisher, engines, "1", refuses=engines)
        assert {type(o) for o in outcomes} == {EngineRejectedUpdate}
