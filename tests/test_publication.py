"""The publication transaction, against fake engines that answer as SGLang 0.5.23 does.

Its faults are in tests/test_publication_faults.py; that a real engine's KV is really gone after a verified flush is
tested in tests/test_publication_engine.py.
"""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.evidence import why_not_flushed, why_not_swept
from slime_backend.fleet import EngineUnfit, Fleet, admit
from slime_backend.fleet.dispatch import generate
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import FAST, fake_fleet, in_flight, request


def test_a_publication_with_requests_in_flight(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            tasks = await in_flight(fleet)
            report = await publish(fleet, NameTransport(), "v1")
            answers = await asyncio.gather(*tasks)
            return report, answers, fleet, engines

    report, answers, fleet, engines = run_async(scenario())
    assert report.state == "resumed"
    assert not report.unconfirmed
    assert [e.flush_verified for e in report.engines] == [True, True]
    assert sum(e.requests_retracted for e in report.engines) == 6
    assert all(e.tokens_to_prefill_again >= 3 * 50 for e in report.engines)
    steps = ["look", "pause", "flush", "load", "weights", "label", "resume"]
    assert [list(e.times) for e in report.engines] == [steps, steps]
    assert all(ms > 0 for e in report.engines for ms in [*e.times.values(), e.paused_ms])
    assert fleet.version == "v1"
    assert [m.version for m in fleet.routable()] == ["v1", "v1"]
    assert [e.label for e in engines] == [e.loaded for e in engines] == ["v1", "v1"]
    for answer in answers:
        assert len(answer.body["output_ids"]) == 200
        assert answer.attempts == 1
        segments = answer.body["meta_info"]["kv_provenance"]
        # Retracted: the context of what follows was computed again, by the new version alone.
        assert segments[-1]["context"] == [{"version": "v1", "start": 0, "end": 249}]


def test_every_engine_is_paused_before_any_is_flushed_and_labelled_after_all_are_loaded(run_async):
    order = []

    async def scenario():
        async with fake_fleet(3) as (fleet, engines):
            for i, engine in enumerate(engines):
                engine.calls = _Tap(order, i)
                engine.latency_s = 0.01 * i
            await publish(fleet, NameTransport(), "v1")

    run_async(scenario())

    def positions(path):
        return [n for n, (_, p) in enumerate(order) if p == path]

    assert max(positions("/pause_generation")) < min(positions("/flush_cache"))
    assert max(positions("/update_weights_from_disk")) < min(positions("/update_weight_version"))
    assert max(positions("/update_weight_version")) < min(positions("/continue_generation"))


class _Tap(list):
    def __init__(self, order, engine):
        super().__init__()
        self.order, self.engine = order, engine

    def append(self, path):
        self.order.append((self.engine, path))


def test_two_publishers_take_turns(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            reports = await asyncio.gather(publish(fleet, NameTransport(), "v1"), publish(fleet, NameTransport(), "v2"))
            return reports, fleet.version, [e.loaded for e in engines]

    reports, version, loaded = run_async(scenario())
    assert [r.previous_version for r in reports] == ["v0", "v1"]
    assert version == "v2"
    assert loaded == ["v2", "v2"]


def test_off_mode_pauses_in_place_and_keeps_what_is_in_flight(run_async):
    async def scenario():
        async with fake_fleet(sharing="off") as (fleet, _):
            tasks = await in_flight(fleet)
            report = await publish(fleet, NameTransport(), "v1")
            return report, await asyncio.gather(*tasks)

    report, answers = run_async(scenario())
    assert sum(e.requests_retracted for e in report.engines) == 0
    assert not any(e.flush_verified for e in report.engines)
    for answer in answers:
        last = answer.body["meta_info"]["kv_provenance"][-1]
        assert [span["version"] for span in last["context"]] == ["v0", "v1"]


def test_scoped_mode_keeps_what_is_in_flight_and_sweeps_what_is_not(run_async):
    async def scenario():
        async with fake_fleet(sharing="scoped") as (fleet, engines):
            await asyncio.gather(*(generate(fleet, request(2, prompt=80)) for _ in range(4)))
            tasks = await in_flight(fleet)
            report = await publish(fleet, NameTransport(), "v1")
            trees = [dict(rank.tree) for engine in engines for rank in engine.ranks]
            answers = await asyncio.gather(*tasks)
            after = await asyncio.gather(*(generate(fleet, request(2)) for _ in range(2)))
            # Of the six that crossed nothing was stored: the trees hold the two later prompts alone.
            kept = [dict(rank.tree) for engine in engines for rank in engine.ranks]
            again = await asyncio.gather(*(generate(fleet, request(2)) for _ in range(2)))
            return report, trees, answers, after, kept, again

    report, trees, answers, after, kept, again = run_async(scenario())
    assert not report.unconfirmed
    assert [(e.sweep_verified, e.flush_verified, e.tokens_swept) for e in report.engines] == [(True, False, 80)] * 2
    assert sum(e.in_flight for e in report.engines) == 6
    assert sum(e.requests_retracted + e.tokens_to_prefill_again for e in report.engines) == 0
    assert trees == [{}, {}]
    for answer in answers:
        meta = answer.body["meta_info"]
        assert len(meta["prefills"]) == 1
        assert [span["version"] for span in meta["kv_provenance"][-1]["context"]] == ["v0", "v1"]
    assert [a.body["meta_info"]["cached_tokens"] for a in after] == [0, 0]
    assert kept == [{2: 50}, {2: 50}]
    assert [a.body["meta_info"]["cached_tokens"] for a in again] == [49, 49]


def test_sweep_verdict_needs_every_proof(run_async):
    async def scenario():
        async with fake_fleet(1, sharing="scoped") as (fleet, _):
            client = next(iter(fleet.members.values())).client
            await generate(fleet, request(2))
            before = await client.reports()
            verdicts = [why_not_swept(before, before, fleet.policy)]
            await client.pause("in_place")
            verdicts.append(why_not_swept(before, await client.reports(), fleet.policy))
            await client.load_from_disk("weights/v1")
            verdicts.append(why_not_swept(before, await client.reports(), fleet.policy))
            await client.label("v1")
            verdicts.append(why_not_swept(before, await client.reports(), fleet.policy))
            return verdicts

    running, paused, loaded, labelled = run_async(scenario())
    assert any("isn't paused" in reason for reason in running)
    for words in ("no weight change", "last swept", "kept entries: tree_full_evictable=50"):
        assert any(words in reason for reason in paused), words
    assert loaded == labelled == []


def test_a_live_engine_with_its_radix_cache_on_is_refused_in_off_mode(run_async):
    async def scenario():
        fleet = Fleet(decide("disjoint", "off"), "v0")
        async with FakeEngine(radix_cache=True) as engine, EngineClient(engine.url) as client:
            await admit(fleet, client)

    with pytest.raises(EngineUnfit, match=r"own report .*radix cache on.*Ways out"):
        run_async(scenario())


def test_an_engine_without_the_needed_hook_is_refused(run_async):
    async def scenario():
        fleet = Fleet(decide("disjoint", "retract"), "v0")
        async with FakeEngine(hooks=()) as engine, EngineClient(engine.url) as client:
            await admit(fleet, client)

    with pytest.raises(EngineUnfit, match=r"kv_evidence \(not loaded\).*REEF_SLIME_HOOKS"):
        run_async(scenario())


def test_an_engine_at_another_version_joins_at_the_next_publication(run_async):
    async def scenario():
        async with (
            fake_fleet(1) as (fleet, _),
            FakeEngine(version="default") as late,
            EngineClient(late.url, name="late", deadlines=FAST) as client,
        ):
            await admit(fleet, client)
            before = [m.name for m in fleet.routable()]
            await publish(fleet, NameTransport(), "v1")
            return before, [m.name for m in fleet.routable()]

    before, after = run_async(scenario())
    assert before == ["engine0"]
    assert after == ["engine0", "late"]


def test_verdict_needs_every_proof(run_async):
    """Each single missing proof is named; with all of them the verdict is empty. (So it can fail, and can pass.)"""

    async def scenario():
        async with fake_fleet(1) as (fleet, _):
            client = next(iter(fleet.members.values())).client
            await generate(fleet, request(2))
            before = await client.reports()
            verdicts = [why_not_flushed(before, before, fleet.policy)]
            await client.pause("retract")
            verdicts.append(why_not_flushed(before, await client.reports(), fleet.policy))
            await client.flush()
            verdicts.append(why_not_flushed(before, await client.reports(), fleet.policy))
            return verdicts

    running, paused, flushed = run_async(scenario())
    assert any("isn't paused" in reason for reason in running)
    assert any("hasn't flushed" in reason for reason in paused)
    assert any("isn't empty: tree_full_evictable=50" in reason for reason in paused)
    assert flushed == []
