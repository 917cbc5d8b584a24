"""`measure_speeds` measures how fast one engine prefills, decodes and admits, to calibrate the planner.

prefill   new prompts, one token each: tokens per second, while nothing is decoded
decode    as many requests and prompts as the traffic has in flight, each as far into its answer as one in flight is: a
          batch of equal lengths decodes faster than one of mixed lengths
admit     requests of one prompt and one token, one after the other, while the same batch decodes: how much each delays
          the batch beyond its prefill. An engine decodes nothing while it admits, however little there is to prefill

Without a radix cache each of these requests prefills its complete prompt, which is subtracted as well.

The speeds are measured before each slice, without publications, and their median is used: a shared machine is faster
and slower by the minute.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time

from slime_backend.engine_client import EngineClient
from slime_backend.planner.measured import EngineSpeeds, Shape

WARM = 16  # tokens
DECODED = 64  # tokens
ADMITTED = 16  # requests, while so many tokens are decoded


def progress_in_flight(shape: Shape) -> list[int]:
    """Return how many tokens each request in flight has, evenly over their distribution.

    At a random time a request has x tokens with a probability proportional to the share of answers longer than x.
    """
    longer = [sum(answer > done for answer in shape.answers) for done in range(max(shape.answers))]
    shares = list(itertools.accumulate(longer))
    middles = [(i + 0.5) / shape.in_flight * shares[-1] for i in range(shape.in_flight)]
    return [bisect.bisect_left(shares, middle) for middle in middles]


async def measure_speeds(
    client: EngineClient, shape: Shape, prompts: int, rng: random.Random, *, radix_cache: bool = True
) -> EngineSpeeds:
    """Measure the speeds with `prompts` different prompts in flight.

    Takes some ten seconds; leaves the cache flushed. Raises EngineError.
    """

    def prompt() -> list[int]:
        return [rng.randrange(256) for _ in range(shape.prompt)]

    async def generate(ids: list[int], tokens: int) -> None:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        await client.generate({"input_ids": ids, "sampling_params": sampling})

    async def batch(of: list[list[int]], tokens: int) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(generate(ids, tokens) for ids in of))
        return time.perf_counter() - started

    async def admit(ids: list[int]) -> None:
        for _ in range(ADMITTED):
            await generate(ids, 1)

    await client.flush()
    known = [prompt() for _ in range(prompts)]
    begun = [max(0, done - DECODED // 2) for done in progress_in_flight(shape)]
    in_flight = [known[i % prompts] + [rng.randrange(256) for _ in range(done)] for i, done in enumerate(begun)]
    await batch(in_flight, WARM)  # an engine's first steps are slow
    prefill_s = await batch([prompt() for _ in range(shape.in_flight // 2)], 1)
    begin_s = await batch(in_flight, 1)
    alone_s = await batch(in_flight, 1 + DECODED)
    started = time.perf_counter()
    await asyncio.gather(batch(in_flight, 1 + DECODED), admit(known[0]))
    combined_s = time.perf_counter() - started
    await client.flush()
    prefill = shape.in_flight // 2 * shape.prompt / prefill_s
    computed = 1 if radix_cache else shape.prompt  # tokens of each admitted request
    delay_s = (combined_s - alone_s) / ADMITTED - computed / prefill
    return EngineSpeeds(
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=shape.in_flight * DECODED / (alone_s - begin_s),
        admission_ms=1000 * delay_s,
    )
