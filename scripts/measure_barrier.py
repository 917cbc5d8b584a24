"""Time the barrier (pause to verified) on 1 and on N fake engines: `python scripts/measure_barrier.py [N] [ROUNDS]`.

The fake engines live in processes of their own and answer each call after 20 ms. Rounds are interleaved; prints medians
in milliseconds and their ratio. What is measured is our side: N engines should take little longer than one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport

LATENCY_S = 0.02


def serve(count: int, ready: Connection) -> None:
    """Run `count` fake engines until this process is ended."""

    async def run() -> None:
        engines = [FakeEngine(latency_s=LATENCY_S, token_s=60.0) for _ in range(count)]
        for engine in engines:
            await engine.start()
        ready.send([engine.url for engine in engines])
        await asyncio.Event().wait()

    asyncio.run(run())


async def measure(urls: list[str], rounds: int) -> tuple[list[float], list[float]]:
    async with AsyncExitStack() as stack:
        fleets = []
        for group in (urls[:1], urls[1:]):
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            for url in group:
                await admit(fleet, await stack.enter_async_context(EngineClient(url)))
            fleets.append(fleet)
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(rounds + 1):
            for fleet, taken in zip(fleets, times, strict=True):
                report = await publish(fleet, NameTransport(), f"v{i + 1}")
                assert not report.unconfirmed, report.unconfirmed
                if i:  # the first round opens the connections
                    taken.append(report.verified_ms)
        return times


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 11
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(count + 1, theirs), daemon=True)
    server.start()
    try:
        one, many = asyncio.run(measure(ours.recv(), rounds))
    finally:
        server.terminate()
    a, b = statistics.median(one), statistics.median(many)
    print(f"pause to verified, median of {rounds}: 1 engine {a:.1f} ms, {count} engines {b:.1f} ms, ratio {b / a:.2f}")


if __name__ == "__main__":
    main()
