"""How fast one engine prefills, decodes and admits: what the planner is calibrated with. No publication in it.

prefill   new prompts, one token each: tokens per second, while nothing is decoded
decode    as many at once as there will be in flight, of as many prompts as there will be, each as far into its answer
          as one in flight is: a batch of equal lengths decodes faster than one of mixed lengths
admit     requests of one prompt and one token, one after the other, beside the same batch: by how much each holds it
          up, besides what it prefills. An engine decodes nothing while it admits, however little there is to prefill

Without a radix cache each of them prefills its whole prompt, and what is compared is then the same on both sides.

Measured before each slice, and the median taken: a machine that others share is faster and slower by the minute.
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


def done_in_flight(shape: Shape) -> list[int]:
    """Tokens that each request in flight has of its answer, evenly over their distribution: one that is met at any time
    has done x with a probability that goes as the share of answers longer than x."""
    longer = [sum(answer > done for answer in shape.answers) for done in range(max(shape.answers))]
    shares = list(itertools.accumulate(longer))
    middles = [(i + 0.5) / shape.in_flight * shares[-1] for i in range(shape.in_flight)]
    return [bisect.bisect_left(shares, middle) for middle in middles]


async def measure_speeds(
    client: EngineClient, shape: Shape, prompts: int, chance: random.Random, *, radix_cache: bool = True
) -> EngineSpeeds:
    """`prompts`: different ones in flight. Takes some ten seconds; leaves the cache flushed. Raises EngineError."""

    def prompt() -> list[int]:
        return [chance.randrange(256) for _ in range(shape.prompt)]

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
    begun = [max(0, done - DECODED // 2) for done in done_in_flight(shape)]
    in_flight = [known[i % prompts] + [chance.randrange(256) for _ in range(done)] for i, done in enumerate(begun)]
    await batch(in_flight, WARM)  # an engine's first steps are slow
    prefill_s = await batch([prompt() for _ in range(shape.in_flight // 2)], 1)
    begin_s = await batch(in_flight, 1)
    alone_s = await batch(in_flight, 1 + DECODED)
    started = time.perf_counter()
    await asyncio.gather(batch(in_flight, 1 + DECODED), admit(known[0]))
    beside_s = time.perf_counter() - started
    await client.flush()
    prefill = shape.in_flight // 2 * shape.prompt / prefill_s
    computed = 1 if radix_cache else shape.prompt  # tokens of each that was admitted
    held_up = (beside_s - alone_s) / ADMITTED - computed / prefill
    return EngineSpeeds(
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=shape.in_flight * DECODED / (alone_s - begin_s),
        admission_ms=1000 * held_up,
    )
