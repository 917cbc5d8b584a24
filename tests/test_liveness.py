"""A paused or loading engine is alive: for requests in flight, the gateway's watch and `reef-slime up` alike."""

from __future__ import annotations

import asyncio

import pytest

from reef_service.watch import Watch
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import EngineStartError
from slime_backend.fleet import FleetError, dispatch, liveness
from slime_backend.fleet.dispatch import generate
from slime_backend.fleet.liveness import look
from slime_backend.local_trainer import local_fleet
from slime_backend.publication import publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import FAST, fake_fleet, request

HASTY = Deadlines(pause=5.0, flush=5.0, load=20.0, control=0.4, generate=300.0)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_engine_is_alive_though_its_health_check_fails(run_async, mode):
    async def scenario():
        async with FakeEngine() as engine, EngineClient(engine.url, deadlines=FAST) as client:
            await client.pause(mode)
            return await client.healthy(5.0), (await look(client)).life

    assert run_async(scenario()) == (False, "alive")


def test_a_loading_engine_is_busy_and_one_that_loads_for_too_long_is_gone(run_async):
    async def scenario():
        async with (
            FakeEngine(load_s=30.0) as engine,
            EngineClient(engine.url, deadlines=HASTY) as client,
            EngineClient(engine.url, deadlines=Deadlines(control=0.2, load=0.5)) as impatient,
        ):
            loading = asyncio.create_task(client.load_from_disk("weights/v1"))
            while not engine._schedulers.locked():
                await asyncio.sleep(0.01)
            healthy = await client.healthy(5.0)
            first = (await look(impatient)).life
            while (last := await look(impatient)).life == "busy":
                pass
            found = await look(client)
            loading.cancel()
            return healthy, found.life, first, last

    healthy, life, first, last = run_async(scenario())
    assert (healthy, life, first, last.life) == (False, "busy", "busy", "gone")
    assert "longer than a load may take" in last.seen


def test_an_answer_of_the_schedulers_ends_what_counts_as_silence(run_async):
    async def scenario():
        async with FakeEngine() as engine, EngineClient(engine.url, deadlines=HASTY) as client:
            engine.faults["/reef_slime/reports"] = ["hang_before"] * 2
            first = await look(client)
            silent = client.silent_since
            await client.generate(request(2))
            return first.life, silent is None, client.silent_since

    assert run_async(scenario()) == ("busy", False, None)


def test_an_engine_that_answers_nothing_is_gone(run_async):
    async def scenario():
        engine = FakeEngine()
        await engine.start()
        async with EngineClient(engine.url, deadlines=FAST) as client:
            engine.dead = True
            broken = (await look(client)).life
            await engine.stop()
            refused = (await look(client)).life
            return broken, refused, await look(client, process_alive=lambda: False)

    broken, refused, ended = run_async(scenario())
    assert (broken, refused, ended.life) == ("gone", "gone", "gone")
    assert ended.seen == "its process has ended"


@pytest.mark.parametrize("sharing", ["off", "retract", "scoped"])
def test_broken_connections_in_a_long_pause_lose_no_engine_and_no_request(run_async, sharing):
    """A proxy resets the connections of all requests in flight, again and again, while the load takes its time."""

    class Resetting(NameTransport):
        async def load(self, client, version):
            for _ in range(12):  # more often than a request may be tried
                for connection in list(client._channel._busy):
                    connection.close()
                await asyncio.sleep(0.05)
            await super().load(client, version)

    async def scenario():
        async with fake_fleet(1, sharing, health_s=0.05) as (fleet, engines):
            asked = [asyncio.create_task(generate(fleet, request(150))) for _ in range(5)]
            while len(engines[0].bodies) < 5:
                await asyncio.sleep(0.005)
            report = await publish(fleet, Resetting(), "v1")
            answers = await asyncio.gather(*asked)
            member = fleet.members["engine0"]
            later = await generate(fleet, request(2))
            return report.unconfirmed, answers, member.status, member.gone.is_set(), later.attempts

    unconfirmed, answers, status, gone, attempts = run_async(scenario())
    assert (unconfirmed, status, gone, attempts) == ({}, "confirmed", False, 1)
    assert [len(a.body["output_ids"]) for a in answers] == [150] * 5
    assert all(a.attempts > 1 for a in answers), "no connection was broken: the test shows nothing"


def test_negative_control_health_alone_retires_the_paused_engine(run_async, monkeypatch):
    """The definition as it was."""

    async def by_health(client, **kwargs):
        return liveness.Look("alive" if await client.healthy(1.0) else "gone", seen="unhealthy")

    monkeypatch.setattr(liveness, "look", by_health)

    async def scenario():
        async with fake_fleet(1, health_s=0.05) as (fleet, _):
            await fleet.members["engine0"].client.pause("in_place")
            return await liveness.check(fleet, fleet.members["engine0"], "a test"), fleet.retired()

    life, retired = run_async(scenario())
    assert life == "gone"
    assert "engine0" in retired


def test_an_engine_that_dies_in_a_publication_is_left_to_it(run_async):
    """The request waits for the publication's verdict, and is answered by the other engine."""

    async def scenario():
        async with fake_fleet(2, token_s=0.005) as (fleet, engines):
            asked = [asyncio.create_task(generate(fleet, request(100))) for _ in range(4)]
            while not all(e.bodies for e in engines):
                await asyncio.sleep(0.005)
            engines[1].faults["/update_weights_from_disk"] = ["die"]
            report = await publish(fleet, NameTransport(), "v1")
            return report.unconfirmed, [a.engine for a in await asyncio.gather(*asked)], fleet.retired()

    unconfirmed, by, retired = run_async(scenario())
    assert unconfirmed["engine1"].startswith("load:")
    assert by == ["engine0"] * 4
    assert "not confirmed at v1" in retired["engine1"]


# ---- the gateway's watch ----------------------------------------------------------------------------------------


async def watched(fleet, looks=4):
    watch = Watch(fleet, 0.01)
    for _ in range(looks):
        await asyncio.gather(*(watch._look(m) for m in list(fleet.members.values())))
    return watch


def test_the_watch_retires_what_is_gone_and_nothing_that_is_paused_or_loads(run_async):
    async def scenario():
        async with fake_fleet(3, deadlines=HASTY, load_s=30.0) as (fleet, engines):
            paused, loading = fleet.members["engine0"].client, fleet.members["engine1"].client
            await paused.pause("in_place")  # another publisher's
            load = asyncio.create_task(loading.load_from_disk("weights/v1"))
            engines[2].dead = True
            await watched(fleet)
            load.cancel()
            return {m.name: m.status for m in fleet.members.values()}

    assert run_async(scenario()) == {"engine0": "confirmed", "engine1": "confirmed", "engine2": "retired"}


def test_the_watch_notices_a_restart(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            await engines[1].restart("v0")
            await watched(fleet, 1)
            return [(m.status, "restarted" in m.reason) for m in fleet.members.values()]

    assert run_async(scenario()) == [("confirmed", False), ("joining", True)]


# ---- reef-slime up ----------------------------------------------------------------------------------------------


def test_up_keeps_engines_that_are_paused_or_load_and_ends_when_one_is_gone(run_async, monkeypatch):
    monkeypatch.setattr(local_fleet, "WATCH_S", 0.01)
    looked = []

    async def counted(client, **kwargs):
        found = await look(client, **kwargs)
        looked.append((client.name, found.life))
        return found

    monkeypatch.setattr(local_fleet, "look", counted)

    async def scenario():
        async with fake_fleet(2, deadlines=HASTY, load_s=30.0, health_s=0.05) as (fleet, _):
            clients = [m.client for m in fleet.members.values()]
            await clients[0].pause("retract")
            load = asyncio.create_task(clients[1].load_from_disk("weights/v1"))
            alive = [True, True]
            up = asyncio.create_task(
                local_fleet.until_one_is_gone([(c, lambda i=i: alive[i]) for i, c in enumerate(clients)])
            )
            while len(looked) < 6:
                assert not up.done()
                await asyncio.sleep(0.01)
            alive[1] = False
            load.cancel()
            await up

    with pytest.raises(EngineStartError, match=r"engine1 no longer answers at http.*: its process has ended"):
        run_async(scenario())
    assert {life for _, life in looked[:6]} == {"alive", "busy"}


@pytest.mark.parametrize("offers", [dispatch.OFFERS, 0])
def test_a_network_that_was_away_for_a_moment_ends_no_run(run_async, monkeypatch, offers):
    """The only engine is out of reach, is retired for it, and comes back. The control: without the offers the request
    fails at once."""
    monkeypatch.setattr(dispatch, "OFFERS", offers)

    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            engines[0].dead = True
            asked = asyncio.create_task(generate(fleet, request(5)))
            while not fleet.retired() and not asked.done():
                await asyncio.sleep(0.005)
            engines[0].dead = False
            return (await asked).body["output_ids"], fleet.members["engine0"].status

    if offers:
        ids, status = run_async(scenario())
        assert (len(ids), status) == (5, "confirmed")
    else:
        with pytest.raises(FleetError, match="no engine left"):
            run_async(scenario())
