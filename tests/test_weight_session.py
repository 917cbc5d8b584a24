"""A weight session that was begun and not heard of blocks no later update (SGLang refuses a second one)."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.engine_client import Deadlines, EngineClient, EngineError, EngineRefused
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet

DEADLINES = Deadlines(pause=2.0, flush=2.0, load=0.5, control=0.3, generate=60.0)
BEGIN, END = "/begin_weight_update", "/end_weight_update"


class InSession(NameTransport):
    """As the transports that need one: distributed, and slime's."""

    async def load(self, client, version):
        async with client.weight_session():
            await client.call(
                "POST", "/update_weights_from_tensor", body={"serialized_named_tensors": [version]}, deadline=2.0
            )


@pytest.mark.parametrize("fault", ["hang_after", "hang_before", "drop_after", "drop_before"])
def test_an_unknown_begin_is_ended_and_the_next_publication_works(run_async, fault):
    async def scenario():
        async with fake_fleet(1, deadlines=DEADLINES) as (fleet, engines):
            engines[0].faults[BEGIN] = [fault]
            with pytest.raises(PublicationError):
                await publish(fleet, InSession(), "v1")
            left_open = engines[0].session_open
            report = await publish(fleet, InSession(), "v2")
            return left_open, report.unconfirmed, engines[0].loaded

    assert run_async(scenario()) == (False, {}, "v2")


def test_the_session_of_a_dead_publisher_is_ended(run_async):
    """It was killed between begin and end; nobody has sent anything since."""

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            engines[1].session_open = True
            report = await publish(fleet, InSession(), "v1")
            return report.unconfirmed, [e.loaded for e in engines], engines[1].session_open

    assert run_async(scenario()) == ({}, ["v1", "v1"], False)


def test_a_publisher_that_is_killed_in_its_session(run_async):
    """Its last call is the begin: neither an end nor a resume leaves the process."""

    class Killed(EngineClient):
        killed = False

        async def call(self, method, path, **options):
            if self.killed:
                await asyncio.sleep(3600)
            answer = await super().call(method, path, **options)
            self.killed = self.killed or path == BEGIN
            return answer

    async def scenario():
        async with FakeEngine() as engine, Killed(engine.url) as dying:

            async def load():
                async with dying.weight_session():
                    raise AssertionError("not reached")

            task = asyncio.create_task(load())
            while not dying.killed:
                await asyncio.sleep(0.005)
            await asyncio.wait({task}, timeout=0.05)
            task.cancel()
            assert engine.session_open
            async with EngineClient(engine.url) as client, client.weight_session():
                inside = engine.session_open
            return inside, engine.session_open, engine.calls.count(END)

    inside, after, ends = run_async(scenario())
    assert (inside, after) == (True, False)
    assert ends == 2  # of the dead one's session and of the next


def test_a_cancelled_begin_is_ended(run_async):
    async def scenario():
        async with FakeEngine() as engine, EngineClient(engine.url, deadlines=DEADLINES) as client:
            engine.faults[BEGIN] = ["hang_after"]

            async def load():
                async with client.weight_session():
                    raise AssertionError("not reached")

            task = asyncio.create_task(load())
            while not engine.session_open:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait({task})
            return task.cancelled(), engine.session_open

    assert run_async(scenario()) == (True, False)


def test_begin_has_a_loads_deadline(run_async):
    """A quantized engine unpacks all its weights there, which takes longer than a label."""

    async def scenario():
        deadlines = Deadlines(load=20.0, control=0.2)
        async with (
            FakeEngine(latency_s=0.6) as engine,
            EngineClient(engine.url, deadlines=deadlines) as client,
            client.weight_session(),
        ):
            return engine.session_open

    assert run_async(scenario())


def test_another_refusal_of_begin_is_no_reason_to_end_anything(run_async):
    async def scenario():
        async with FakeEngine() as engine, EngineClient(engine.url, deadlines=DEADLINES) as client:
            engine.faults[BEGIN] = ["refuse"]
            with pytest.raises(EngineRefused):
                async with client.weight_session():
                    pass
            return engine.calls.count(END)

    assert run_async(scenario()) == 0


def test_an_end_that_fails_too_leaves_the_first_error(run_async):
    async def scenario():
        async with FakeEngine() as engine, EngineClient(engine.url, deadlines=DEADLINES) as client:
            engine.faults[BEGIN], engine.faults[END] = ["drop_after"], ["hang_before"]
            with pytest.raises(EngineError, match=BEGIN):
                async with client.weight_session():
                    pass

    run_async(scenario())
