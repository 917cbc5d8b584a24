"""Waits for a state, each with a deadline, and requests that end only when a test ends them.

No sleep stands for a state: an engine may be ten times faster than the author's, or ten times slower.

    async with endless(client, [prompt(300)] * 3) as flights:   # the engine decodes all three, and goes on
        report = await publish(fleet, transport, "v1")
        answers = await landed(flights)                         # each has gone on since, and was then ended

`REEF_TEST_DELAY_S` is the test of the tests: every wait for requests in flight then returns so much later. What a test
claims must hold with any delay that the length of its requests (ENDLESS) leaves room for.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.wire import KvEvidence

DELAY_S = float(os.environ.get("REEF_TEST_DELAY_S", "0"))
DEADLINE_S = 60.0  # for what takes milliseconds on an idle machine
POLL_S = 0.01
ENDLESS = 30000  # tokens: many seconds on any CPU, and within the context of the models of these tests (32768)
MORE_SLOTS = 48  # of KV that a request has taken when it has gone on: three pages of 16 tokens
TOO_FAST = "a request ended by itself before the test ended it; it needs more than its {} tokens on this machine"


async def until(holds: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Poll `holds`, which may be a coroutine function, until its result is true; return that result."""
    end = time.monotonic() + seconds
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_S)


def wait_until(holds: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """`until` outside of an event loop."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_S)
    return found


class Flight:
    """One request at an engine that goes on until `end`."""

    def __init__(self, client: EngineClient, body: dict[str, Any]) -> None:
        self.client, self.rid = client, uuid.uuid4().hex
        self.tokens = body["sampling_params"]["max_new_tokens"]
        self.task = asyncio.create_task(client.generate({**body, "rid": self.rid}))

    def check(self) -> None:
        """Fail where it is over."""
        if self.task.done():
            self.task.result()  # it may have been refused
            raise AssertionError(TOO_FAST.format(self.tokens))

    async def end(self) -> dict[str, Any]:
        """End it; its answer up to here."""
        self.check()
        await self.client.abort(self.rid)
        return await self.task

    async def drop(self) -> None:
        """End it where it goes on, whatever has become of its engine; the next test finds an engine without it."""
        if not self.task.done():
            with suppress(EngineError):
                await self.client.abort(self.rid)
                await asyncio.wait([self.task], timeout=DEADLINE_S)
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def endless_body(ids: Sequence[int], tokens: int = ENDLESS) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling}


@asynccontextmanager
async def endless(
    client: EngineClient, prompts: Sequence[Sequence[int]], *, tokens: int = ENDLESS
) -> AsyncIterator[list[Flight]]:
    """One request for each prompt. All decode when the block begins, by the engine's own report, and are ended when it
    is left. The engine must have nothing else to do.
    """
    flights = [Flight(client, endless_body(ids, tokens)) for ids in prompts]
    try:
        await decoding(flights)
        yield flights
    finally:
        for flight in flights:
            await flight.drop()


async def decoding(flights: Sequence[Flight]) -> None:
    """Return once each has sampled some tokens more than when this was called."""

    def check() -> None:
        for flight in flights:
            flight.check()

    await goes_on(flights[0].client, len(flights), check)


async def goes_on(client: EngineClient, requests: int, check: Callable[[], None] = lambda: None) -> None:
    """Return once the engine decodes so many requests, and each has sampled some tokens more than when it did first.

    `check` raises where the wait has no sense any more.
    """

    async def reports() -> list[KvEvidence]:
        check()
        return [report.kv for report in await client.reports()]

    async def all_admitted() -> list[KvEvidence] | None:
        found = await reports()
        return found if all_decode(found, requests) else None

    before = await until(all_admitted, f"{requests} requests decode")

    async def gone_on() -> bool:
        return have_gone_on(before, await reports(), requests)

    await until(gone_on, f"{requests} requests go on")
    await delayed()


def all_decode(reports: Sequence[KvEvidence], requests: int) -> bool:
    """Whether so many are past their prefill, which samples their first token, and none is before it."""
    return sum(kv.running for kv in reports) >= requests and not any(kv.waiting or kv.chunked for kv in reports)


def have_gone_on(before: Sequence[KvEvidence], now: Sequence[KvEvidence], requests: int) -> bool:
    """Whether all that decode have sampled tokens since `before`, while nothing else came or went.

    They take each step together, and each takes a slot, or a page of slots, for what it will sample.
    """
    taken = sum(kv.full_free for kv in before) - sum(kv.full_free for kv in now)
    return taken >= MORE_SLOTS * requests


async def landed(flights: Sequence[Flight]) -> list[dict[str, Any]]:
    """Let each go on for some tokens, end it, and return the answers."""
    await decoding(flights)
    return [await flight.end() for flight in flights]


async def delayed() -> None:
    if DELAY_S:
        await asyncio.sleep(DELAY_S)
