"""`reef-slime bench overhead` measures what recording costs, in tokens decoded per second.

One engine is compared with itself: its hooks are taken out of the running scheduler and put back between batches
(engine_plugin/hook_switch.py), because two engines that are started alike differ by more than recording costs. In each
round the same prompts are answered three times, in an order that changes from round to round:

    off      SGLang's own functions everywhere, but for the attention that makes a CPU engine fast
    again    the same once more: its difference from `off` is the noise of this machine
    on       every hook

So each round gives one ratio of `on` to the other two of the very same moment; a row holds the medians over the rounds,
and the interval that the true median of the ratio lies in. A batch is complete requests: a short prompt's prefill, the
decoded tokens, and the record of each finished request. The model is tiny, so its steps are short, and a fixed cost per
step or per request weighs more than on any model that one would train; answers are short, so the record of a request
does too.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_backend.bench.catalog import Log
from slime_backend.bench.engines import running_engines
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import BenchError, Row, report_rows
from slime_backend.engine_client import EngineClient
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.simulation.models import make_tiny_model
from slime_backend.wire import KV_PROVENANCE_KEY, SWITCH_KEY

OFF, AGAIN, ON = "off", "again", "on"
SIDES = (OFF, AGAIN, ON)
HOOKS = tuple(HOOK_MODULES)
GOAL = 0.98
PROMPT = 16
TOKENS = 16  # of each answer: a fraction of a second, so that the three of a round see the same machine
ROUNDS = {1: 240, 8: 200, 32: 300}  # batch -> rounds
WARM_UP = 5
CONFIDENCE = 0.95
PARTS = ("hybrid", "dense")  # every hook is active with the first; steps are shorter with the second

PLOTS = tuple(
    Plot(
        model,
        f"Decode with every hook, tiny {model} model",
        "requests in a batch",
        "tokens per second",
        rf"decode, {model}, batch (?P<x>\d+), every hook in; .*",
        "hooks out",
        "hooks in",
    )
    for model in PARTS
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison has medians over rounds. `low` .. `high` holds the true median of the ratio with 95 % confidence."""

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
    """Return the rank (from 0) such that the median lies between the values of this rank from below and from above.

    Order statistics, whatever the distribution: each value lies below the median with probability 1/2, so the number
    that do is binomial. Raises BenchError where `count` values are too few for any such interval.
    """
    rank, below = 0, 0.5**count  # `below`: the chance that no more than `rank` values lie below the median
    while below <= (1 - confidence) / 2:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    if rank == 0:
        raise BenchError(f"{count} rounds are too few for {confidence:.0%} confidence; take more")
    return rank - 1


async def switch(engine: EngineClient, on: bool) -> None:
    await engine.call("POST", "/set_internal_state", body={"server_args": {SWITCH_KEY: int(on)}})


async def decode(engine: EngineClient, prompts: Sequence[Sequence[int]], recorded: bool) -> float:
    """Return the tokens per second of one batch that is sent at once, from sending to the last answer.

    Raises BenchError where the answers have a record although the hooks are out, or none although they are in.
    """
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling} for ids in prompts]
    start = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(body) for body in bodies))
    seconds = time.perf_counter() - start
    if any((KV_PROVENANCE_KEY in answer["meta_info"]) != recorded for answer in answers):
        raise BenchError(f"the hooks were switched {'on' if recorded else 'off'} and the answers show the opposite")
    return sum(len(answer["output_ids"]) for answer in answers) / seconds


async def measure(engine: EngineClient, batch: int, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Return for each side the tokens per second of each round."""
    await engine.flush()
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    order = list(SIDES)
    for number in range(WARM_UP + rounds):
        prompts = [[rng.randrange(256) for _ in range(PROMPT)] for _ in range(batch)]
        rng.shuffle(order)
        for side in order:
            await switch(engine, side == ON)
            # A first token of its own: the second and the third must find no more in the cache than the first.
            speed = await decode(engine, [[SIDES.index(side), *ids] for ids in prompts], side == ON)
            if number >= WARM_UP:
                found[side].append(speed)
    await switch(engine, True)
    return found


def row(model: str, batch: int, side: str, found: Comparison) -> Row:
    """Make the row of a side; the peer is the engine with the hooks out."""
    what = "every hook in" if side == ON else "the hooks out once more"
    return Row(
        f"decode, {model}, batch {batch}, {what}; ratio within {found.low:.3f} .. {found.high:.3f}",
        round(found.peer, 1),
        round(found.ours, 1),
        round(found.ratio, 4),
        f"at least {GOAL:g}" if side == ON else "about 1",
        # The control holds where it can't hide a miss: two sides that are alike, within what the goal allows.
        found.ratio >= GOAL if side == ON else abs(found.ratio - 1) <= 1 - GOAL,
    )


async def bench_overhead(log: Log, rows: list[Row], parts: Collection[str] = PARTS) -> None:
    """Add all rows to `rows`. Takes a quarter of an hour. Raises EngineStartError, EngineError or BenchError."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        for name in parts:
            model = make_tiny_model(Path(folder) / name, hybrid=name == "hybrid")
            log(f"starting an engine: {name}")
            async with running_engines(model, Path(folder), name, {"engine": HOOKS}) as engines:
                engine = engines["engine"]
                missing = (await engine.reports())[0].missing_hooks(HOOKS)
                if missing:
                    raise BenchError(f"not every hook is active, so there is nothing to measure: {missing}")
                log(f"measuring: {name}")
                for batch, rounds in ROUNDS.items():
                    speeds = await measure(engine, batch, rounds, rng)
                    both = [(a + b) / 2 for a, b in zip(speeds[OFF], speeds[AGAIN], strict=True)]
                    for side, peer in ((ON, both), (AGAIN, speeds[OFF])):
                        report_rows([row(name, batch, side, Comparison.of(peer, speeds[side]))], rows, log)
