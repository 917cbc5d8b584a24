"""`run_slice` runs one slice of `bench modes`: one mode and one interval, for some twenty-five seconds of traffic.

    drop      slime's sequence; what it aborts is thrown away and the next prompts take the places, as in slime's
              sglang_rollout without --partial-rollout
    requeue   slime's sequence; what it aborts is sent again with the tokens that it has, as slime's fully-async
              worker does. At once: that slime looks once a second for places to fill isn't held against it here
    retract, off, scoped   the policies of policy.py, by our transaction; off runs on an engine without a radix cache

Publications begin every `interval` seconds, or as soon as the last one ended where that took longer. The work
between two of them is counted, from weights loaded to weights loaded: complete cycles, each with its pause. Every token
is attributed, because every answer names the version that sampled each of its tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from slime_backend.bench.mode_load import Counts, ModeLoad, Try, all_admitted
from slime_backend.bench.rows import BenchError
from slime_backend.bench.slime_sequence import slime_sequence
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.planner.measured import Shape, Slice
from slime_backend.planner.predict import ABORTING
from slime_backend.planner.work import Mode
from slime_backend.policy import PrefixSharing, decide
from slime_backend.publication import publish
from slime_backend.transports.disk import CheckpointTransport

LATE_S = 60.0  # that a slice may take beyond its time


@dataclass(frozen=True, slots=True)
class PublicationTiming:
    loaded_at: float  # time.perf_counter()
    paused_ms: float  # from the pause sent to the resume answered


Publish = Callable[[str, Path], Awaitable[PublicationTiming]]  # version, checkpoint


async def run_slice(
    client: EngineClient,
    mode: Mode,
    shape: Shape,
    *,
    interval_s: float,
    seed: int,
    number: int,
    checkpoints: Sequence[Path],
    warm: int,
    counted: int,
) -> Slice:
    """Run one slice of traffic and publications.

    `number`: no two slices of one engine have the same. `checkpoints` are published in turns. The window has `counted`
    publications, and begins with the `warm`-th.

    Raises BenchError, EngineError, PublicationError.
    """
    await client.label(f"{number}.0")
    await client.flush()
    publish_one = _slime(client) if mode in ABORTING else await _ours(client, cast(PrefixSharing, mode), f"{number}.0")
    timings: list[PublicationTiming] = []
    started = time.perf_counter()

    async def publications() -> None:
        for count in range(1, warm + counted + 1):
            await asyncio.sleep(max(0.0, started + count * interval_s - time.perf_counter()))
            timings.append(await publish_one(f"{number}.{count}", checkpoints[count % len(checkpoints)]))
        await all_admitted(client)

    async with ModeLoad(client, shape, seed, keep_tokens=mode != "drop") as load:
        publisher = asyncio.create_task(publications())
        try:
            await _until_done(publisher, load, (warm + counted) * interval_s + LATE_S)
        finally:
            publisher.cancel()
            await asyncio.gather(publisher, return_exceptions=True)
    return summarise(mode, interval_s, seed, warm, load.tries, timings)


def summarise(
    mode: Mode, interval_s: float, seed: int, warm: int, tries: Sequence[Try], timings: Sequence[PublicationTiming]
) -> Slice:
    """Summarise the slice between the `warm`-th of `timings`, counted from 1, and the last one."""

    def inside(counts: Counts) -> int:
        return sum(tokens for number, tokens in counts if warm <= number < len(timings))

    kept = [t for t in tries if t.finished or mode != "drop"]
    ended = [t.request_sampled for t in tries if t.finished and warm <= t.request_sampled[-1][0] < len(timings)]
    lag = sum(
        (request_sampled[-1][0] - number) * tokens for request_sampled in ended for number, tokens in request_sampled
    )
    return Slice(
        mode=mode,
        interval_s=interval_s,
        seed=seed,
        seconds=timings[-1].loaded_at - timings[warm - 1].loaded_at,
        publications=len(timings) - warm,
        finished=len(ended),
        tokens=sum(inside(t.sampled) for t in kept),
        thrown_away=sum(inside(t.sampled) for t in tries) - sum(inside(t.sampled) for t in kept),
        prefilled=sum(inside(t.prefilled) for t in tries),
        lag_mean=lag / max(1, sum(tokens for request_sampled in ended for _, tokens in request_sampled)),
        mixed_share=sum(len({number for number, _ in request_sampled}) > 1 for request_sampled in ended)
        / max(1, len(ended)),
        paused_ms=statistics.median(timing.paused_ms for timing in timings[warm:]),
    )


def _slime(client: EngineClient) -> Publish:
    async def one(version: str, checkpoint: Path) -> PublicationTiming:
        loaded: list[float] = []

        async def load(engine: EngineClient) -> None:
            await engine.load_from_disk(str(checkpoint))
            loaded.append(time.perf_counter())
            await engine.label(version)

        stop = await slime_sequence([client], load)
        return PublicationTiming(loaded[0], stop.resumed_ms)

    return one


class _Timed(CheckpointTransport):
    """This transport records when the weights were loaded (time.perf_counter())."""

    loaded_at = 0.0

    async def load(self, client: EngineClient, version: str) -> None:
        await super().load(client, version)
        self.loaded_at = time.perf_counter()


async def _ours(client: EngineClient, sharing: PrefixSharing, version: str) -> Publish:
    fleet = Fleet(decide("disjoint", sharing), version)
    await admit(fleet, client)

    async def one(version: str, checkpoint: Path) -> PublicationTiming:
        transport = _Timed(checkpoint)
        report = await publish(fleet, transport, version)
        if report.unconfirmed:
            raise BenchError(f"a publication failed: {report.unconfirmed}")
        return PublicationTiming(transport.loaded_at, report.engines[0].paused_ms or 0.0)  # a confirmed engine has it

    return one


async def _until_done(publisher: asyncio.Task[None], load: ModeLoad, deadline_s: float) -> None:
    """Wait for the publisher. Raises what it or a request raised, BenchError after the deadline."""
    until = time.monotonic() + deadline_s
    while not publisher.done():
        if time.monotonic() > until:
            raise BenchError(f"the publications of a slice aren't done after {deadline_s:g} s")
        await asyncio.wait([publisher], timeout=1.0)
        load.check()
    publisher.result()
