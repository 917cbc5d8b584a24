"""An engine is what it was confirmed as: a set of scheduler processes at a version, not an address."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, FleetError, Member, admit, dispatch, liveness, readmit_retired
from slime_backend.fleet.dispatch import RequestLost, generate
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet, request


async def restarted_at_v0(fleet, engines, version="v3"):
    """The fleet is at `version`; engine1 crashed and is back at its address with the weights of its start."""
    await publish(fleet, NameTransport(), version)
    await engines[1].restart("v0")


def versions(answer):
    return {span["version"] for span in answer.body["meta_info"]["weight_versions"]}


def test_no_answer_of_a_restarted_engine_is_returned(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            await restarted_at_v0(fleet, engines)
            answers = await asyncio.gather(*(generate(fleet, request(2)) for _ in range(8)))
            return answers, {m.name: m.status for m in fleet.members.values()}, engines[1].bodies

    answers, status, asked = run_async(scenario())
    assert asked, "no request reached the restarted engine: the test shows nothing"
    assert {frozenset(versions(a)) for a in answers} == {frozenset({"v3"})}
    assert status == {"engine0": "confirmed", "engine1": "joining"}


def test_negative_control_without_the_comparison_the_old_weights_answer(run_async, monkeypatch):
    monkeypatch.setattr(dispatch.Sent, "check_version", lambda self, meta: None)

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            await restarted_at_v0(fleet, engines)
            return await asyncio.gather(*(generate(fleet, request(2)) for _ in range(8)))

    assert {"v0"} in [versions(a) for a in run_async(scenario())]


def test_the_next_publication_takes_a_restarted_engine_for_a_newcomer(run_async):
    """Nobody noticed the restart until then. It isn't routed any more as soon as the publication looks."""
    seen = {}

    class Looking(NameTransport):
        async def load(self, client, version):
            seen[client.name] = (fleet_at_load.members[client.name].status, list(fleet_at_load.routable()))
            await super().load(client, version)

    async def scenario():
        global fleet_at_load
        async with fake_fleet() as (fleet, engines):
            fleet_at_load = fleet
            await restarted_at_v0(fleet, engines)
            report = await publish(fleet, Looking(), "v4")
            known = [
                m.instances == {r.instance_id for r in e.ranks}
                for m, e in zip(fleet.members.values(), engines, strict=True)
            ]
            return report, known, [(m.status, m.version) for m in fleet.members.values()]

    report, known, members = run_async(scenario())
    assert not report.unconfirmed
    assert seen["engine1"][0] == "joining"
    assert [m.name for m in seen["engine1"][1]] == ["engine0"]
    assert known == [True, True]
    assert members == [("confirmed", "v4")] * 2


def test_a_publication_that_fails_everywhere_doesn_t_confirm_what_restarted(run_async):
    """engine0 serves on at v3, untouched; engine1 is another engine than the one that was confirmed at v3."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            await restarted_at_v0(fleet, engines)
            for engine in engines:
                engine.faults["/flush_cache"] = ["refuse"] * 1000
            with pytest.raises(PublicationError):
                await publish(fleet, NameTransport(), "v4")
            return [m.name for m in fleet.routable()]

    assert run_async(scenario()) == ["engine0"]


def test_a_restarted_engine_is_checked_against_the_policy_again(run_async):
    """It is back with the radix cache on, which this policy can't make safe."""

    async def scenario():
        async with fake_fleet(sharing="off") as (fleet, engines):
            await publish(fleet, NameTransport(), "v1")
            engines[1].radix_cache = True
            await engines[1].restart("v1")  # even the right label
            report = await publish(fleet, NameTransport(), "v2")
            return report.unconfirmed, [m.name for m in fleet.routable()], engines[1].loaded

    unconfirmed, routable, loaded = run_async(scenario())
    assert "radix cache" in unconfirmed["engine1"]
    assert routable == ["engine0"]
    assert loaded == "v1"  # it wasn't touched


def test_a_failed_request_finds_the_restart(run_async):
    """The connection broke with the old process; the new one lives. The label is right, so no answer would show it."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            await publish(fleet, NameTransport(), "v1")
            await engines[1].restart("v1")
            engines[1].faults["/generate"] = ["drop_before"]
            await asyncio.gather(*(generate(fleet, request(2)) for _ in range(2)))
            return {m.name: (m.status, m.reason) for m in fleet.members.values()}

    status = run_async(scenario())
    assert status["engine0"][0] == "confirmed"
    assert status["engine1"][0] == "joining"
    assert "restarted" in status["engine1"][1]


def test_an_engine_that_comes_back_without_the_plugin_is_retired(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            member = fleet.members["engine1"]

            async def absent(body):
                return (await engines[1].on_model_info(body))._replace(body={"detail": "Not Found"}, status=404)

            async def bare(body):
                return (await engines[1].on_model_info(body))._replace(body={"internal_states": [{}]})

            engines[1].on_reef_slime_reports, engines[1].on_server_info = absent, bare
            life = await liveness.check(fleet, member, "a test")
            return life, fleet.retired()

    life, retired = run_async(scenario())
    assert life == "alive"
    assert "REEF_SLIME_HOOKS" in retired["engine1"]


@pytest.mark.parametrize("moment", ["before", "in between", "two publications"])
def test_answers_of_the_versions_that_a_request_lived_through_are_returned(run_async, moment):
    """A request may end under the version before, the new one, or one of several since it was sent."""

    async def scenario():
        async with fake_fleet(1, token_s=0.01) as (fleet, engines):
            asked = asyncio.create_task(generate(fleet, request(60)))
            while not engines[0].ranks[0].requests:
                await asyncio.sleep(0.005)
            if moment != "before":
                await publish(fleet, NameTransport(), "v1")
            if moment == "two publications":
                await publish(fleet, NameTransport(), "v2")
            return await asked

    answer = run_async(scenario())
    assert answer.attempts == 1
    assert len(answer.body["output_ids"]) == 60


def test_an_answer_under_the_name_that_is_being_published_counts(run_async):
    """An engine resumes, and answers, before the fleet has moved."""

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            engines[1].faults["/continue_generation"] = ["refuse", "refuse"]
            asked = [asyncio.create_task(generate(fleet, request(40))) for _ in range(6)]
            await asyncio.sleep(0.03)
            await publish(fleet, NameTransport(), "v1")
            return [(await a).attempts for a in asked]

    assert run_async(scenario()) == [1] * 6


def test_one_engine_that_answers_as_another_version_for_good_is_an_error(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            fleet.wait_s = 0.2
            engines[0].label = "v7"  # somebody else publishes to it
            await generate(fleet, request(2))

    with pytest.raises((FleetError, RequestLost), match="it answers as version 'v7'; the fleet is at 'v0'"):
        run_async(scenario())


# ---- confirmation and retirement can't disagree -----------------------------------------------------------------


def test_who_is_confirmed_again_is_usable_again(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, _):
            member = fleet.members["engine0"]
            fleet.retire(member, "a test")
            fleet.confirm(member, "v0")
            return member.gone.is_set(), (await generate(fleet, request(2))).attempts

    assert run_async(scenario()) == (False, 1)


def test_a_request_of_before_doesn_t_take_a_later_confirmation_for_its_own(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            asked = asyncio.create_task(generate(fleet, request(20)))
            while not engines[0].bodies:
                await asyncio.sleep(0.001)
            member = fleet.members["engine0"]
            fleet.retire(member, "a test")
            fleet.confirm(member, "v0")
            return (await asked).attempts

    assert run_async(scenario()) == 2


# ---- who is offered admission again -----------------------------------------------------------------------------


def test_a_retired_engine_is_offered_admission_before_each_publication(run_async):
    """One slow report, and it was lost for the rest of a training run."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            fleet.retire(fleet.members["engine1"], "one slow report")
            report = await publish(fleet, NameTransport(), "v1")
            return report.unconfirmed, [m.name for m in fleet.routable()], [e.loaded for e in engines]

    assert run_async(scenario()) == ({}, ["engine0", "engine1"], ["v1", "v1"])


def test_a_hung_retired_engine_doesn_t_hold_the_publication(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            fleet.retire(fleet.members["engine1"], "it hung")
            engines[1].faults["/server_info"] = ["hang_before"] * 3
            await asyncio.wait_for(readmit_retired(fleet, deadline_s=0.3), 20)
            return fleet.retired()["engine1"]

    assert run_async(scenario()) == "it hung (not admitted again: no answer within 0.3 s)"


def test_a_suspect_joins_and_is_confirmed_only_by_a_publication(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            engines[1].faults["/update_weights_from_disk"] = ["drop_after"]
            await publish(fleet, NameTransport(), "v1")
            engines[1].label = "v1"  # it claims what nobody has confirmed
            await readmit_retired(fleet)
            joined = fleet.members["engine1"].status
            await publish(fleet, NameTransport(), "v2")
            return joined, [m.name for m in fleet.routable()]

    assert run_async(scenario()) == ("joining", ["engine0", "engine1"])


def test_a_newcomer_that_is_admitted_while_a_publication_prepares_waits_for_the_next(run_async):
    """It has no part in what was prepared; it is neither touched nor aborted."""

    class Preparing(NameTransport):
        prepared = ()

        async def prepare(self, version, clients):
            self.prepared = [c.name for c in clients]
            if hook is not None:
                await hook()

        async def load(self, client, version):
            assert client.name in self.prepared
            await super().load(client, version)

    async def scenario():
        nonlocal hook
        async with (
            fake_fleet() as (fleet, _),
            FakeEngine() as late,
            EngineClient(late.url, name="late") as client,
        ):

            async def join():
                await admit(fleet, client)

            hook = join
            report = await publish(fleet, Preparing(), "v1")
            first = [e.engine for e in report.engines], fleet.members["late"].status, "/abort_request" in late.calls
            hook = None
            report = await publish(fleet, Preparing(), "v2")
            return first, report.unconfirmed, [m.name for m in fleet.routable()]

    hook = None
    first, unconfirmed, routable = run_async(scenario())
    assert first == (["engine0", "engine1"], "joining", False)
    assert (unconfirmed, routable) == ({}, ["engine0", "engine1", "late"])


def test_an_engine_that_is_retired_while_a_publication_prepares_has_no_part_in_it(run_async):
    class Preparing(NameTransport):
        async def prepare(self, version, clients):
            fleet_now.retire(fleet_now.members["engine1"], "it died")

    async def scenario():
        nonlocal fleet_now
        async with fake_fleet() as (fleet, engines):
            fleet_now = fleet
            report = await publish(fleet, Preparing(), "v1")
            return [e.engine for e in report.engines], "/pause_generation" in engines[1].calls

    fleet_now = None
    assert run_async(scenario()) == (["engine0"], False)


def test_versions_since_forgets_and_stays_small():
    fleet = Fleet(decide("disjoint", "retract"), "v0")
    mark = fleet.mark()
    assert fleet.versions_since(mark) == {"v0"}
    fleet.begin("v1")
    during = fleet.mark()
    assert fleet.versions_since(during) == {"v0", "v1"}
    fleet.version = "v1"
    fleet.end()
    assert fleet.versions_since(mark) == fleet.versions_since(during) == {"v0", "v1"}
    assert fleet.versions_since(fleet.mark()) == {"v1"}
    for i in range(2, 5000):
        fleet.begin(f"v{i}")
        fleet.version = f"v{i}"
        fleet.end()
    assert fleet.versions_since(fleet.mark()) == {"v4999"}
    assert len(fleet.versions_since(mark)) < 300


def test_an_engine_that_was_never_asked_has_no_instances():
    assert Member(EngineClient("http://127.0.0.1:1")).instances == frozenset()


def test_a_weight_group_belongs_to_the_processes_that_joined_it(run_async, monkeypatch):
    """A restarted engine that is asked through the same client is in no group: it joins another one."""
    distributed = pytest.importorskip("slime_backend.transports.distributed", reason="needs torch")

    class Pair:
        def __init__(self, name, host, timeout_s, engine_ranks=1):
            self.name, self.port, self.stopped, self.size = name, 1, False, 1 + engine_ranks
            made.append(self)

        def connect(self):
            pass

        def stop(self):
            self.stopped = True

    made = []
    monkeypatch.setattr(distributed, "EngineGroup", Pair)

    class Joining(distributed.DistributedTransport):
        async def load(self, client, version):
            await client.load_from_disk(f"weights/{version}")

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            for engine in engines:

                async def joined(body):
                    return (await engines[0].on_abort_request({}))._replace(body={"success": True})

                engine.on_init_weights_update_group = joined
            transport = Joining(None)
            counts = []
            for version in ("v1", "v2"):
                assert not (await publish(fleet, transport, version)).unconfirmed
                counts.append(len(made))
            await engines[1].restart("v0")
            engines[1].on_init_weights_update_group = joined
            assert not (await publish(fleet, transport, "v3")).unconfirmed
            return counts, len(made), [pair.stopped for pair in made]

    assert run_async(scenario()) == ([2, 2], 3, [False, True, False])
