"""The publication transaction and its faults, against fake engines that answer as SGLang 0.5.23 does.

That a real engine's KV is really gone after a verified flush is tested in tests/test_publication_engine.py.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from slime_backend.dispatch import generate
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.evidence import why_not_flushed, why_not_swept
from slime_backend.fleet import EngineUnfit, Fleet, FleetError, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport

# Long enough for a busy machine, short enough for the tests that wait for one to pass. `generate` is longer than any
# test may take: a request must not wait for it on an engine that is gone.
FAST = Deadlines(pause=1.0, flush=1.0, load=1.0, control=1.0, generate=300.0)


@asynccontextmanager
async def fake_fleet(count=2, sharing="retract", **engine):
    policy = decide("disjoint", sharing)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(FakeEngine(radix_cache=policy.radix_cache, **engine)) for _ in range(count)
        ]
        fleet = Fleet(policy, "v0")
        for i, fake in enumerate(engines):
            client = EngineClient(fake.url, name=f"engine{i}", deadlines=FAST)
            stack.push_async_callback(client.close)
            await admit(fleet, client)
        yield fleet, engines


def request(tokens=200, prompt=50):
    return {"input_ids": list(range(prompt)), "sampling_params": {"max_new_tokens": tokens}}


async def in_flight(fleet, count=6, tokens=200):
    tasks = [asyncio.create_task(generate(fleet, request(tokens))) for _ in range(count)]
    await asyncio.sleep(0.05)
    return tasks


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
    for name in ("pause_ms", "flush_ms", "load_ms", "label_ms", "resume_ms", "paused_ms"):
        assert all(getattr(e, name) > 0 for e in report.engines), name
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


# One engine of two misbehaves; the other must go on. (path, faults, the step that is blamed)
# A load that lies is not among them: only an audit can tell (docs/publication.md).
FAULTS = [
    ("/pause_generation", ["refuse"], "pause"),
    ("/pause_generation", ["lie"], "flush"),  # it says 200 and isn't paused: its evidence tells
    ("/pause_generation", ["hang_before"], "pause"),
    ("/pause_generation", ["drop_before"], "pause"),
    ("/pause_generation", ["die"], "pause"),
    ("/flush_cache", ["lie"] * 100, "flush"),
    ("/flush_cache", ["refuse"] * 100, "flush"),
    ("/flush_cache", ["die"], "flush"),
    ("/update_weights_from_disk", ["refuse"], "load"),
    ("/update_weights_from_disk", ["hang_before"], "load"),
    ("/update_weights_from_disk", ["drop_after"], "load"),
    ("/update_weights_from_disk", ["die"], "load"),
    ("/update_weight_version", ["refuse"], "label"),
    ("/update_weight_version", ["lie"], "label"),
    ("/update_weight_version", ["drop_after"], "label"),
    ("/continue_generation", ["refuse"] * 3, "resume"),
    ("/continue_generation", ["lie"] * 3, "resume"),  # the scheduler may have died behind a server that says 200
    ("/continue_generation", ["die"], "resume"),
]


@pytest.mark.parametrize(("path", "faults", "step"), FAULTS, ids=lambda v: str(v)[:30])
def test_one_engine_fails_and_is_retired_the_other_goes_on(run_async, path, faults, step):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            tasks = await in_flight(fleet, tokens=300)
            engines[1].faults[path] = list(faults)
            report = await publish(fleet, NameTransport(), "v1")
            answers = await asyncio.gather(*tasks)
            return report, answers, fleet, engines

    report, answers, fleet, engines = run_async(scenario())
    assert report.state == "resumed"
    assert list(report.unconfirmed) == ["engine1"]
    assert report.engines[1].failed_step == step
    assert report.engines[1].reason
    assert [m.name for m in fleet.routable()] == ["engine0"]
    assert "engine1" in fleet.retired()
    # No engine that still lives is left paused, and each request came back whole, from a confirmed engine.
    assert not engines[0].paused
    assert engines[1].dead or step == "resume" or not engines[1].paused
    assert [len(a.body["output_ids"]) for a in answers] == [300] * 6
    for answer in answers:
        # The failing engine may end what it ran before it was retired, as the version that it was confirmed at then.
        versions = {span["version"] for span in answer.body["meta_info"]["weight_versions"]}
        assert answer.engine == "engine0" or versions == {"v0"}


@pytest.mark.parametrize(
    ("path", "faults"),
    [
        ("/flush_cache", ["refuse", "refuse"]),  # an overlapped batch drains: refused, then accepted
        ("/flush_cache", ["drop_after"]),  # took effect, the answer was lost: the evidence decides
        ("/flush_cache", ["hang_after"]),
        ("/continue_generation", ["refuse"]),
        ("/continue_generation", ["drop_after"]),
        ("/continue_generation", ["drop_before"]),
        ("/continue_generation", ["lie"]),
    ],
    ids=str,
)
def test_passing_faults_are_ridden_out(run_async, path, faults):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            engines[1].faults[path] = list(faults)
            report = await publish(fleet, NameTransport(), "v1")
            return report, [e.paused for e in engines]

    report, paused = run_async(scenario())
    assert not report.unconfirmed
    assert paused == [False, False]


def test_one_rank_refuses_the_flush_behind_rank_zero(run_async):
    """SGLang answers a flush with rank 0's result alone; each rank's own evidence is what counts."""

    async def scenario():
        async with fake_fleet(2, ranks=3) as (fleet, engines):
            await asyncio.gather(*(generate(fleet, request(2)) for _ in range(12)))
            engines[1].ranks[2].refuse_flush = True
            return await publish(fleet, NameTransport(), "v1")

    report = run_async(scenario())
    assert report.engines[1].failed_step == "flush"
    assert "rank 2" in report.engines[1].reason
    assert "rank 1" not in report.engines[1].reason


def test_every_engine_fails_before_its_weights_are_touched(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            for engine in engines:
                engine.faults["/flush_cache"] = ["refuse"] * 1000
            with pytest.raises(PublicationError) as failed:
                await publish(fleet, NameTransport(), "v1")
            # The fleet serves on at the old version.
            assert [m.version for m in fleet.routable()] == ["v0", "v0"]
            assert not any(e.paused for e in engines)
            for engine in engines:
                engine.faults.clear()
            again = await publish(fleet, NameTransport(), "v1")
            return failed.value, again

    failure, again = run_async(scenario())
    assert failure.report.state == "failed"
    assert "flush" in str(failure)
    assert not again.unconfirmed


def test_cancelled_in_the_middle_nothing_stays_paused(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            tasks = await in_flight(fleet)
            engines[0].faults["/update_weights_from_disk"] = ["hang_before"]
            publication = asyncio.create_task(publish(fleet, NameTransport(), "v1"))
            await asyncio.sleep(0.2)
            publication.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publication
            paused = [e.paused for e in engines]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return paused, [m.name for m in fleet.routable()]

    paused, routable = run_async(scenario())
    assert paused == [False, False]
    assert routable == []  # their weights are unknown


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


def _stays_in_the_old_epoch(engine):
    """Loads and labels, and its cache still answers under the old key."""
    for rank in engine.ranks:
        rank.skip_sweep = True


def _loses_the_hook(engine):
    engine.hooks["scope"] = "the cache is of another kind"


def _sweeps_one_rank_of_two(engine):
    engine.ranks[1].skip_sweep = True


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_stays_in_the_old_epoch, r"label: rank 0 .*last swept for epoch None; rank 0 kept entries: tree_full_evicta"),
        (_sweeps_one_rank_of_two, r"label: rank 1 is in epoch 2 and last swept for epoch None"),
        (_loses_the_hook, r"label: rank 0's hook scope: the cache is of another kind"),
    ],
)
def test_an_engine_that_is_not_swept_is_retired(run_async, fault, expected):
    async def scenario():
        async with fake_fleet(sharing="scoped", ranks=2) as (fleet, engines):
            await asyncio.gather(*(generate(fleet, request(2)) for _ in range(8)))
            tasks = await in_flight(fleet)
            fault(engines[1])
            report = await publish(fleet, NameTransport(), "v1")
            return report, await asyncio.gather(*tasks), [m.name for m in fleet.routable()], [e.paused for e in engines]

    report, answers, routable, paused = run_async(scenario())
    assert list(report.unconfirmed) == ["engine1"]
    assert re.match(expected, report.unconfirmed["engine1"])
    assert [e.sweep_verified for e in report.engines] == [True, False]
    assert (routable, paused) == (["engine0"], [False, False])
    assert {a.engine for a in answers} == {"engine0"}  # those of the retired engine were sent again


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


def test_a_restarted_engine_is_not_taken_for_the_old_one(run_async):
    """It restarts between pause and flush: flushed and empty, but not the process that was paused."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            flush = engines[1].on_flush_cache

            async def restarted(body):
                answer = await flush(body)
                for rank in engines[1].ranks:
                    rank.instance_id = "another"
                return answer

            engines[1].on_flush_cache = restarted
            return await publish(fleet, NameTransport(), "v1")

    report = run_async(scenario())
    assert "restarted" in report.unconfirmed["engine1"]


def test_no_engine_left_is_an_error_not_a_hang(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            engines[0].dead = True
            await generate(fleet, request(2))

    with pytest.raises(FleetError, match="no engine left"):
        run_async(scenario())


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


def test_a_half_loaded_engine_is_not_vouched_for_by_its_old_label(run_async):
    """The load took effect, its answer was lost, on every engine: the fleet stays at v0, but no engine is at v0."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            for engine in engines:
                engine.faults["/update_weights_from_disk"] = ["drop_after"]
            with pytest.raises(PublicationError):
                await publish(fleet, NameTransport(), "v1")
            labels = [e.label for e in engines]
            for engine in engines:
                engine.label = "v0"  # as if taking the old label back had failed too
            for member in list(fleet.members.values()):
                await admit(fleet, member.client)
            routable = [m.name for m in fleet.routable()]
            await publish(fleet, NameTransport(), "v2")
            return labels, routable, [m.version for m in fleet.routable()]

    labels, routable, healed = run_async(scenario())
    assert labels == ["unconfirmed-v1", "unconfirmed-v1"]
    assert routable == []
    assert healed == ["v2", "v2"]


def test_a_rival_controller_is_noticed_before_anything_is_labelled(run_async):
    """Two controllers that know nothing of each other publish at once: neither may label what it hasn't loaded."""

    async def scenario():
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(FakeEngine(latency_s=0.01))
            fleets = []
            for _ in range(2):
                fleet = Fleet(decide("disjoint", "retract"), "v0")
                client = await stack.enter_async_context(EngineClient(engine.url, name="e", deadlines=FAST))
                await admit(fleet, client)
                fleets.append(fleet)
            results = await asyncio.gather(
                *(publish(f, NameTransport(), f"v{i + 1}") for i, f in enumerate(fleets)), return_exceptions=True
            )
            return results, engine.paused, engine.label, engine.loaded

    results, paused, label, loaded = run_async(scenario())
    assert all(isinstance(r, PublicationError) for r in results)
    assert "another publisher is at work" in str(results[0])
    assert not paused
    assert label == loaded == "v0"


def test_an_engine_of_unknown_weights_is_retired_before_it_resumes(run_async):
    """It runs the new weights under the old label: not even the first request after its resume may be answered."""

    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            engines[0].faults["/update_weight_version"] = ["refuse"] * 2  # the label, and taking the old one back
            client = fleet.members["engine0"].client
            resume, asked = client.resume, []

            async def resume_and_ask():
                await resume()
                with pytest.raises(FleetError, match="label"):
                    await generate(fleet, request(2))
                asked.append((engines[0].loaded, engines[0].label, engines[0].paused))

            client.resume = resume_and_ask
            with pytest.raises(PublicationError):
                await publish(fleet, NameTransport(), "v1")
            return asked

    assert run_async(scenario()) == [("v1", "v0", False)]
