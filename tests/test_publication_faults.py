"""The transaction under faults, one at a time, against fake engines over HTTP: fleet state, error and report."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import pytest

from slime_backend.engine_client import EngineClient, EngineRefused
from slime_backend.fleet import Fleet, FleetError, admit
from slime_backend.fleet.dispatch import generate
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import FAST, fake_fleet, in_flight, request
from tests.waiting import until

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
        ("/update_weight_version", ["drop_after"]),  # the same label twice is the same label
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
            await until(lambda: "/update_weights_from_disk" in engines[0].calls, "the load has begun")
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


def test_cancelled_again_and_again_while_it_resumes_nothing_stays_paused(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            engines[0].faults["/continue_generation"] = ["hang_before"]  # until its deadline; then it is asked again
            publication = asyncio.create_task(publish(fleet, NameTransport(), "v1"))
            await until(lambda: "/continue_generation" in engines[0].calls, "the resume has begun")
            for _ in range(3):
                publication.cancel()
                await asyncio.sleep(0)  # it takes this one before the next
            with pytest.raises(asyncio.CancelledError):
                await publication
            return [e.paused for e in engines], [m.name for m in fleet.routable()], fleet.version

    assert run_async(scenario()) == ([False, False], ["engine0", "engine1"], "v1")


def test_what_ended_the_whole_publication_is_every_engines_reason(run_async):
    class Broken(NameTransport):
        async def load(self, client, version):
            raise ValueError("the source has no tensors")

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            with pytest.raises(ValueError, match="no tensors"):
                await publish(fleet, Broken(), "v1")
            return [e.paused for e in engines], fleet.retired()

    paused, retired = run_async(scenario())
    assert paused == [False, False]
    assert list(retired) == ["engine0", "engine1"]
    assert all(why.endswith("ValueError: the source has no tensors") for why in retired.values())


def test_an_engine_whose_admission_fails_is_not_in_the_fleet(run_async):
    async def scenario():
        async with (
            fake_fleet() as (fleet, _),
            FakeEngine() as late,
            EngineClient(late.url, name="late") as client,
        ):
            late.faults["/model_info"] = ["refuse"]
            with pytest.raises(EngineRefused):
                await admit(fleet, client)
            listed = list(fleet.members)
            await admit(fleet, client)
            return listed, [m.name for m in fleet.routable()]

    assert run_async(scenario()) == (["engine0", "engine1"], ["engine0", "engine1", "late"])


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
