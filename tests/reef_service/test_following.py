"""A gateway in front of engines that another controller publishes to, as slime's trainer does.

The other controller is a fleet and a transaction of its own; the engines are fake.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.following import Moves
from slime_backend.fleet.liveness import look
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet
from tests.reef_service.harness import CHAT, gateway_on, until

QUICK = {"watch_s": 0.05, "hold_s": 20}


@asynccontextmanager
async def other_controller(engines, version="v0"):
    """A fleet of the same engines, in other hands."""
    fleet = Fleet(decide("disjoint", "retract"), version)
    clients = [EngineClient(engine.url) for engine in engines]
    for client in clients:
        await admit(fleet, client)
    try:
        yield fleet
    finally:
        for client in clients:
            await client.close()


def test_the_gateway_moves_with_engines_that_somebody_else_publishes_to(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", config=QUICK) as (client, gateway, engines):
            found = []
            async with other_controller(engines) as other:
                for version in ("v1", "v2"):
                    await publish(other, NameTransport(), version)
                    status, answer = await client.post("/v1/chat/completions", CHAT)
                    found.append((status, answer["reef"]["versions"]))
                    await until(lambda: len(gateway.fleet.routable()) == len(engines))
            return found, gateway.fleet.version

    found, version = run_async(work())
    assert found == [(200, ["v1"]), (200, ["v2"])]
    assert version == "v2"


@pytest.mark.parametrize("version", ["v1", "v0"])
def test_a_process_that_restarts_between_look_and_label_is_not_followed(run_async, version):
    async def work():
        async with fake_fleet(1) as (fleet, (engine,)):
            (member,) = fleet.members.values()
            moves, confirmed = Moves(fleet), member.instances
            before = await look(member.client, looks=1)
            await engine.restart(version)
            if version == "v0":
                fleet.demote(member, "for a moment it couldn't be told what it was")
            await moves.follow({member: before})
            return fleet.version, member.status, member.instances == confirmed

    assert run_async(work()) == ("v0", "joining" if version == "v0" else "confirmed", True)


def test_without_following_nobody_is_answered(tmp_path, run_async, monkeypatch):
    async def stay(self, looks):
        return None

    monkeypatch.setattr(Moves, "follow", stay)

    async def work():
        async with gateway_on(tmp_path, "yes", config=QUICK) as (client, gateway, engines):
            gateway.fleet.wait_s = 1.0
            async with other_controller(engines) as other:
                await publish(other, NameTransport(), "v1")
            return (await client.post("/v1/chat/completions", CHAT))[0]

    assert run_async(work()) == 503


@pytest.mark.parametrize("what", ["restarted", "of a failed publication", "several names", "paused"])
def test_what_proves_nothing_is_not_followed(tmp_path, run_async, what):
    async def work():
        async with gateway_on(tmp_path, "yes", config=QUICK) as (_, gateway, engines):
            looked = gateway.watch.seen
            await until(lambda: len(looked) == len(engines))
            if what == "restarted":
                for engine in engines:
                    await engine.restart("v1")
            elif what == "paused":
                for engine in engines:
                    async with EngineClient(engine.url) as direct:
                        await direct.pause("retract")
                    engine.label = "v1"
            else:
                for number, engine in enumerate(engines):
                    engine.label = f"v{number + 1}" if what == "several names" else "unconfirmed-v1"
            before = {name: seen.at for name, seen in looked.items()}
            await until(lambda: all(looked[name].at > at for name, at in before.items()))
            before = {name: seen.at for name, seen in looked.items()}
            await until(lambda: all(looked[name].at > at for name, at in before.items()))
            return gateway.fleet.version

    assert run_async(work()) == "v0"
