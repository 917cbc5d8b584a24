"""This part of `bench fleet` times the calls of a barrier by our HTTP client and by aiohttp's, to fake engines."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from slime_backend.bench.rows import BenchError, Row, cost_row
from slime_backend.engine_client.http import HttpChannel
from slime_backend.wire import REPORTS_PATH

# Between pause and verified, in this order, and the resume, so that the next round finds the engines as they were.
CALLS: tuple[tuple[str, str, bytes | None], ...] = (
    ("POST", "/pause_generation", b'{"mode":"retract"}'),
    ("POST", "/flush_cache", None),
    ("GET", REPORTS_PATH, None),
    ("POST", "/continue_generation", b"{}"),
)
TIMED = 3
DEADLINE_S = 30.0
OURS, PEER = "ours", "aiohttp"
Call = Callable[[str, str, bytes | None], Awaitable[int]]  # method, path, body -> status


@dataclass(slots=True)
class Costs:
    """These are one client's costs of all timed calls, in ms, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of this process


def clients() -> tuple[str, ...]:
    """Return the clients that can be measured here."""
    return (OURS, PEER) if importlib.util.find_spec("aiohttp") is not None else (OURS,)


async def time_clients(urls: Sequence[str], rounds: int) -> dict[str, Costs]:
    """Return the costs of each client. They take turns, and the first one changes from round to round; one round more
    warms up.

    Raises BenchError where a call is not answered by 200.
    """
    opened = {OURS: our_calls, PEER: aiohttp_calls}
    costs = {name: Costs() for name in clients()}
    async with AsyncExitStack() as stack:
        calls = {name: await stack.enter_async_context(opened[name](urls)) for name in costs}
        for number in range(rounds + 1):
            for name in list(costs) if number % 2 else list(costs)[::-1]:
                wall, cpu = await _time_round(calls[name])
                if number:
                    costs[name].wall.append(wall)
                    costs[name].cpu.append(cpu)
    return costs


async def _time_round(calls: Sequence[Call]) -> tuple[float, float]:
    """Return the wall and the CPU time of the timed calls, in ms, without a garbage collection, as in a publication."""

    async def barrier(call: Call, steps: slice) -> None:
        for method, path, body in CALLS[steps]:
            status = await call(method, path, body)
            if status != 200:
                raise BenchError(f"{method} {path} was answered by HTTP {status}")

    gc.collect()
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(barrier(call, slice(TIMED)) for call in calls))
        found = 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)
    finally:
        gc.enable()
    await asyncio.gather(*(barrier(call, slice(TIMED, None)) for call in calls))
    return found


@asynccontextmanager
async def our_calls(urls: Sequence[str]) -> AsyncIterator[list[Call]]:
    def calls_of(channel: HttpChannel) -> Call:
        async def call(method: str, path: str, body: bytes | None) -> int:
            return (await channel.request(method, path, body, DEADLINE_S)).status

        return call

    channels = [HttpChannel(url) for url in urls]
    try:
        yield [calls_of(channel) for channel in channels]
    finally:
        for channel in channels:
            channel.close()


@asynccontextmanager
async def aiohttp_calls(urls: Sequence[str]) -> AsyncIterator[list[Call]]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    headers = {"Content-Type": "application/json"}

    def calls_of(session: aiohttp.ClientSession, url: str) -> Call:
        async def call(method: str, path: str, body: bytes | None) -> int:
            async with session.request(method, url + path, data=body, headers=headers) as answer:
                await answer.read()
                return answer.status

        return call

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield [calls_of(session, url) for url in urls]


def client_rows(size: int, costs: Mapping[str, Costs]) -> list[Row]:
    peer = costs.get(PEER)
    compared = "beside aiohttp" if peer is not None else "aiohttp isn't installed"
    what = f"pause, flush and reports, {size} engine{'s' * (size > 1)}, our client {compared}, ms"
    return [
        cost_row(what, None if peer is None else peer.wall, costs[OURS].wall),
        cost_row(f"the controller's CPU for {what}", None if peer is None else peer.cpu, costs[OURS].cpu),
    ]
