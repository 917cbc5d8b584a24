"""The publisher inside slime, on fake engines behind a fake router; slime's list of engines is a list of stubs."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from slime_backend.event_loop import LoopThread
from slime_backend.policy import decide
from slime_backend.provenance.jsonl import read_jsonl
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from slime_backend.slime_hooks.weights.errors import EngineRejectedUpdate, PublicationFailed
from slime_backend.slime_hooks.weights.publisher import SlimePublisher
from tests.waiting import wait_until

from ..fake_fleet import FAST
from .fake_router import FakeRouter


class StubEngine:
    """Stands for slime's engine actor: a fake engine, and what the publisher may ask the actor."""

    def __init__(self, fake, router, key):
        self.fake, self.fake_router, self.key = fake, router, key
        self.url, self.router = fake.url, router.url
        self.discarded = False

    def route(self):
        # What a request would be answered with, from the first moment that it can come here.
        self.label_when_routed = self.fake.label
        self.fake_router.add(self.url)

    def discard(self):
        self.discarded = True


@contextmanager
def engines_and_publisher(tmp_path, count=2, sharing="retract", version="0", discard=False, **engine):
    servers = LoopThread()
    policy = decide("disjoint", sharing)
    router = FakeRouter()
    fakes = [FakeEngine(version="default", radix_cache=policy.radix_cache, **engine) for _ in range(count)]
    for fake in fakes:
        servers.submit(fake.start()).result()
    publisher = SlimePublisher(policy, version, run_dir=tmp_path, deadlines=FAST, discard_retired=discard)
    try:
        yield publisher, [StubEngine(fake, router, f"actor{i}") for i, fake in enumerate(fakes)], router
    finally:
        publisher.close()
        for fake in fakes:
            servers.submit(fake.stop()).result()
        servers.stop()
        router.stop()


def publish(publisher, engines, version):
    publisher.enroll(engines)
    return publisher.finish(publisher.start(NameTransport(), version))


def names(publisher):
    return {m.name: m.status for m in publisher.fleet.members.values()}


def test_engines_are_routed_once_they_are_confirmed(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        publisher.enroll(engines)
        publisher.settle_routing()
        assert router.workers == []
        figures = publish(publisher, engines, "1")
        assert sorted(router.workers) == sorted(e.url for e in engines)
        assert [e.label_when_routed for e in engines] == ["1", "1"]
        assert [e.fake.loaded for e in engines] == ["1", "1"]
        assert figures["reef/publication/confirmed"] == 2
        assert figures["reef/publication/flushes_verified"] == 2
        publish(publisher, engines, "2")
    assert [r["version"] for r in read_jsonl(tmp_path / "publications.jsonl")] == ["1", "2"]


def test_an_engine_with_the_label_of_the_start_is_routed_without_a_publication(tmp_path):
    """Delta: what the engines were started with is the first version."""
    with engines_and_publisher(tmp_path, version="default") as (publisher, engines, router):
        publisher.enroll(engines)
        publisher.settle_routing()
        assert len(router.workers) == 2


def test_an_engine_that_fails_leaves_the_router_before_it_resumes(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        publish(publisher, engines, "1")
        bad = engines[1]
        bad.fake.faults["/update_weights_from_disk"] = ["refuse"]
        router.on_remove = lambda url: router.seen.append((url, bad.fake.paused))
        publish(publisher, engines, "2")
        assert router.workers == [engines[0].url]
        assert router.seen == [(bad.url, True)]  # still paused when it was taken out
        # Tried again, and good: it is back.
        publish(publisher, engines, "3")
        assert sorted(router.workers) == sorted(e.url for e in engines)
        assert bad.label_when_routed == "3"
        assert not bad.discarded


def test_with_fault_tolerance_a_retired_engine_is_ended_and_its_successor_waits_for_weights(tmp_path):
    with engines_and_publisher(tmp_path, count=3, discard=True) as (publisher, engines, router):
        old, successor = engines[1], engines[2]
        publish(publisher, engines[:2], "1")
        old.fake.faults["/update_weights_from_disk"] = ["refuse"]
        publish(publisher, engines[:2], "2")
        assert old.discarded
        publisher.enroll([engines[0], successor])  # slime has started another one
        publisher.settle_routing()
        assert router.workers == [engines[0].url]
        publish(publisher, [engines[0], successor], "3")
        assert sorted(router.workers) == sorted([engines[0].url, successor.url])
        assert successor.label_when_routed == "3"
        assert old.url.partition("://")[2] not in names(publisher)


def test_an_engine_started_at_the_address_of_another_is_a_new_one(tmp_path):
    with engines_and_publisher(tmp_path, count=1) as (publisher, engines, router):
        publish(publisher, engines, "1")
        again = StubEngine(engines[0].fake, router, "another actor")
        publish(publisher, [again], "2")
        assert again.label_when_routed == "2"


def test_an_engine_that_restarted_leaves_the_router_until_it_is_confirmed(tmp_path):
    """slime's list still has it, under the same actor; it serves the weights of its start."""
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        publish(publisher, engines, "1")
        back = engines[1]
        back.fake.label = back.fake.loaded = "default"
        back.fake.ranks[0].instance_id = "another process"
        router.on_remove = lambda url: router.seen.append((url, back.fake.label))
        publish(publisher, engines, "2")
        assert router.seen == [(back.url, "default")]
        assert sorted(router.workers) == sorted(e.url for e in engines)
        assert back.label_when_routed == "2"


def test_a_dead_engine_is_left_out(tmp_path):
    with engines_and_publisher(tmp_path) as (publisher, engines, router):
        engines[1].fake.dead = True
        publish(publisher, engines, "1")
        assert router.workers == [engines[0].url]


def test_without_any_engine_the_publication_fails(tmp_path):
    with engines_and_publisher(tmp_path, count=1) as (publisher, engines, _):
        engines[0].fake.dead = True
        with pytest.raises(PublicationFailed, match="none of slime's engines answers"):
            publish(publisher, engines, "1")


def test_an_override_that_turned_the_radix_cache_on_is_found_on_the_live_engine(tmp_path):
    with engines_and_publisher(tmp_path, sharing="off") as (publisher, engines, _):
        engines[1].fake.radix_cache = True
        with pytest.raises(PublicationFailed, match="turns the radix cache on"):
            publish(publisher, engines, "1")


def test_an_engine_without_the_plugin_is_refused(tmp_path):
    with (
        engines_and_publisher(tmp_path, count=1, hooks=()) as (publisher, engines, _),
        pytest.raises(PublicationFailed, match="REEF_SLIME_HOOKS"),
    ):
        publish(publisher, engines, "1")


def test_a_rejection_by_every_engine_is_its_own_error(tmp_path):
    with engines_and_publisher(tmp_path, count=1) as (publisher, engines, _):
        engines[0].fake.faults["/update_weights_from_disk"] = ["refuse"]
        with pytest.raises(EngineRejectedUpdate, match=r"127\.0\.0\.1:\d+: .*load.*refused"):
            publish(publisher, engines, "1")
        assert not engines[0].fake.paused


def test_a_failed_flush_is_not_a_rejected_update(tmp_path):
    with engines_and_publisher(tmp_path, count=1) as (publisher, engines, _):
        for rank in engines[0].fake.ranks:
            rank.refuse_flush = True
        with pytest.raises(PublicationFailed, match="flush") as caught:
            publish(publisher, engines, "1")
        assert not isinstance(caught.value, EngineRejectedUpdate)


def test_in_place_keeps_the_requests_in_flight(tmp_path):
    with engines_and_publisher(tmp_path, count=1, sharing="scoped") as (publisher, engines, _):
        publish(publisher, engines, "1")

        async def ask():
            from slime_backend.engine_client import EngineClient

            async with EngineClient(engines[0].url, deadlines=FAST) as client:
                return await client.generate({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1000}})

        answers = []
        thread = threading.Thread(target=lambda: answers.append(asyncio.run(ask())))
        thread.start()
        rank = engines[0].fake.ranks[0]
        wait_until(lambda: rank.requests and rank.requests[0].sampled, "it decodes")
        publish(publisher, engines, "2")
        thread.join()
        meta = answers[0]["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert [s["version"] for s in meta["weight_versions"]] == ["1", "2"]
