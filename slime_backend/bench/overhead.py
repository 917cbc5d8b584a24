"""`reef-slime bench overhead`: what recording costs, in tokens decoded per second.

Three engines of one model on this CPU, alike but for their hooks and idle while another is timed:

    off      the plugin's hooks off, but for the attention that makes a CPU engine fast, which is on everywhere
    again    the same once more: what two engines that are alike differ by is what this machine can't tell apart
    on       every hook

In each round all three answer the same prompts, one engine after the other, and the order changes from round to round,
so each round gives one ratio to `off` of the very same moment. A row holds the medians of the rounds. A round is whole
requests, prefill and the record of the finished request included, with some hundred tokens decoded for a short prompt.
The model is tiny, so a step is short and a fixed cost per step weighs more than on any model that one would train.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_backend.bench.engines import running_engines
from slime_backend.bench.rows import BenchError, Row, told
from slime_backend.engine_client import EngineClient
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.local_trainer.models import make_tiny_model

OFF, AGAIN, ON = "off", "again", "on"
HOOKS = {OFF: ("cpu_attention",), AGAIN: ("cpu_attention",), ON: tuple(HOOK_MODULES)}
GOAL = 0.98
PROMPT = 16
# Batch -> tokens of each answer: some half a second a round, so that the three of a round see the same machine.
BATCHES = {1: 192, 8: 128, 32: 64}
ROUNDS = 60
WARM_UP = 3
CONFIDENCE = 0.95

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over rounds. `low` .. `high` holds the true median of the ratio with 95 % confidence."""

    peer: float  # tokens per second
    ours: float
    ratio: float  # of each round: ours / peer
    low: float
    high: float

    @classmethod
    def of(cls, peer: Sequence[float], ours: Sequence[float]) -> Comparison:
        ratios = sorted(b / a for a, b in zip(peer, ours, strict=True))
        rank = interval_rank(len(ratios), CONFIDENCE)
        return cls(
            statistics.median(peer), statistics.median(ours), statistics.median(ratios), ratios[rank], ratios[-1 - rank]
        )


def interval_rank(count: int, confidence: float) -> int:
    """Rank (from 0) such that the median lies between the values of this rank from below and from above.

    Order statistics, whatever the distribution: each value lies below the median with probability 1/2, so the number
    that do is binomial. Raises BenchError where `count` values are too few for any such interval.
    """
    rank, below = 0, 0.5**count  # `below`: the chance that no more than `rank` values lie below the median
    while below <= (1 - confidence) / 2:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    if rank == 0:
        raise BenchError(f"{count} rounds are too few to say anything with {confidence:.0%} confidence; take more")
    return rank - 1


async def decode(client: EngineClient, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens per second of one batch that is sent at once, from sending to the last answer."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    bodies = [{"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling} for ids in prompts]
    start = time.perf_counter()
    answers = await asyncio.gather(*(client.generate(body) for body in bodies))
    seconds = time.perf_counter() - start
    return sum(len(answer["output_ids"]) for answer in answers) / seconds


async def measure(
    engines: Mapping[str, EngineClient], batch: int, tokens: int, rounds: int, rng: random.Random
) -> dict[str, list[float]]:
    """Side -> tokens per second of each round."""
    found: dict[str, list[float]] = {side: [] for side in engines}
    order = list(engines)
    for number in range(WARM_UP + rounds):
        prompts = [[rng.randrange(256) for _ in range(PROMPT)] for _ in range(batch)]
        rng.shuffle(order)
        for side in order:
            speed = await decode(engines[side], prompts, tokens)
            if number >= WARM_UP:
                found[side].append(speed)
    return found


def row(model: str, batch: int, side: str, found: Comparison) -> Row:
    """`peer`: tokens per second with the hooks off."""
    what = "every hook on" if side == ON else "no hook either (what the machine can't tell apart)"
    return Row(
        f"decode, {model}, batch {batch}, {what}; ratio within {found.low:.3f} .. {found.high:.3f}",
        round(found.peer, 1),
        round(found.ours, 1),
        round(found.ratio, 4),
        f"at least {GOAL:g}" if side == ON else "about 1",
        # The control holds where it can't hide a miss: two engines alike within what the goal allows.
        found.ratio >= GOAL if side == ON else abs(found.ratio - 1) <= 1 - GOAL,
    )


async def bench_overhead(say: Say, rows: list[Row], rounds: int = ROUNDS) -> None:
    """Add all rows to `rows`. Takes some minutes. Raises EngineStartError, EngineError or BenchError."""
    interval_rank(rounds, CONFIDENCE)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        for name in ("dense", "hybrid"):
            model = make_tiny_model(Path(folder) / name, hybrid=name == "hybrid")
            say(f"starting three engines: {name}")
            async with running_engines(model, Path(folder), name, HOOKS) as engines:
                missing = (await engines[ON].reports())[0].missing_hooks(HOOKS[ON])
                if missing:
                    raise BenchError(f"not every hook is active, so there is nothing to measure: {missing}")
                for batch, tokens in BATCHES.items():
                    speeds = await measure(engines, batch, tokens, rounds, rng)
                    for side in (ON, AGAIN):
                        rows.append(row(name, batch, side, Comparison.of(speeds[OFF], speeds[side])))
                        say(told(rows[-1]))
