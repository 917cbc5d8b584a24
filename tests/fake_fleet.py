"""A fleet of fake engines over HTTP, and requests for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.dispatch import generate
from slime_backend.policy import decide
from slime_backend.simulation.fake_engine import FakeEngine
from tests.waiting import until

# Long enough for a busy machine, short enough for the tests that wait for one to pass. `generate` is longer than any
# test may take: a request must not wait for it on an engine that is gone.
FAST = Deadlines(pause=1.0, flush=1.0, load=1.0, control=1.0, generate=300.0)


@asynccontextmanager
async def fake_fleet(count=2, sharing="retract", deadlines=FAST, **engine):
    policy = decide("disjoint", sharing)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(FakeEngine(radix_cache=policy.radix_cache, **engine)) for _ in range(count)
        ]
        fleet = Fleet(policy, "v0")
        for i, fake in enumerate(engines):
            client = EngineClient(fake.url, name=f"engine{i}")
            client.fake = fake
            stack.push_async_callback(client.close)
            await admit(fleet, client)  # without haste: no test is about this
            client.deadlines = deadlines
        yield fleet, engines


def request(tokens=200, prompt=50):
    return {"input_ids": list(range(prompt)), "sampling_params": {"max_new_tokens": tokens}}


async def in_flight(fleet, count=6, tokens=200):
    """So many requests, each of which has its first token. The fakes of `fake_fleet` sample in the test's own event
    loop, at most one token in each of its rounds: a busy machine slows them as it slows the test.
    """
    tasks = [asyncio.create_task(generate(fleet, request(tokens))) for _ in range(count)]
    fakes = [m.client.fake for m in fleet.members.values() if hasattr(m.client, "fake")]

    def decoding():
        return sum(bool(r.sampled) for fake in fakes for rank in fake.ranks for r in rank.requests) >= count

    await until(decoding, f"{count} requests decode")
    return tasks
