"""Broken connections in a long pause of a real engine: nothing is lost, whatever SGLang's /health says meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.fleet.dispatch import generate
from slime_backend.fleet.liveness import look
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import DiskTransport
from tests.helpers import body, fleet_on, prompt, versions

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("sharing", ["retract", "off"])
def test_connections_that_break_in_a_long_pause_lose_no_engine_and_no_request(
    engine, sources, tmp_path, run_async, sharing
):
    """The pause lasts until /health has failed and every connection was broken more often than a request may fail.

    Nothing else is asked meanwhile: any answer of a scheduler makes /health succeed.
    """
    seen = []

    class Breaking(DiskTransport):
        async def load(self, client, version):
            for _ in range(10):
                for connection in list(client._channel._busy):
                    connection.close()
                await asyncio.sleep(0.1)
            seen.append(await client.healthy(5.0))
            seen.append((await look(client, process_alive=engine.alive)).life)  # as `reef-slime up` asks
            await super().load(client, version)

    async def scenario():
        policy = decide("disjoint", "retract" if sharing == "retract" else "unsafe")  # an in-place pause, cache or not
        async with fleet_on(engine, policy) as (fleet, client):
            asked = [asyncio.create_task(generate(fleet, body(prompt(50), 400, 1.0))) for _ in range(5)]
            while (await client.reports())[0].kv.running < 5:
                await asyncio.sleep(0.01)
            report = await publish(fleet, Breaking(sources["b"], tmp_path), next(versions))
            answers = await asyncio.gather(*asked)
            later = await generate(fleet, body(prompt(20), 3))
            return report, answers, [m.status for m in fleet.members.values()], later.attempts

    report, answers, status, attempts = run_async(scenario(), 180)
    assert seen[1] == "alive"
    assert sharing == "retract" or seen[0] is False  # after a retract the ends of the lost requests make it answer
    assert report.unconfirmed == {}
    assert [len(a.body["output_ids"]) for a in answers] == [400] * 5
    assert all(a.attempts > 1 for a in answers), "no connection was broken: the test shows nothing"
    assert (status, attempts) == (["confirmed"], 1)
