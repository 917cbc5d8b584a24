"""`reef-slime bench attention` compares the hook `cpu_attention` with SGLang's `torch_native`, on a CPU.

Two engines of one tiny dense model, with the hook and without, one thread each. Both get the same requests, one engine
after the other, so that neither runs while the other is timed; which one comes first changes from round to round. Times
are those of complete requests over HTTP.

    hits      a cached prefix and a tail of 64 new tokens, one output token
    decode    a batch of cached prompts: the time for 64 tokens more, in tokens per second
    prefill   a prompt that nothing is cached of, one output token
    alone     the attention of a pass by itself, without the step and the request around it, which are the same on both
              sides; for this model, and for the heads of one whose attention weighs more

The hybrid model isn't compared: there the stock class reads the KV of other tokens (tests/engine_plugin).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from slime_backend.bench.attention_alone import SMOLLM2, TINY, Pass, alone_rows
from slime_backend.bench.catalog import Log
from slime_backend.bench.engines import running_engines
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import BenchError, Row, cost_row, ratio, report_rows, short, spread
from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import DEFAULT_HOOKS
from slime_backend.simulation.models import make_tiny_model
from slime_backend.wire import ACTIVE

PARTS = ("hits", "decode", "prefill", "alone")
HOOK = "cpu_attention"
TAIL = 64
PREFIXES = {1024: 9, 4096: 9, 8192: 9, 16384: 7}  # cached tokens -> rounds
LONG = 8192  # from here on the goal counts
HIT_GOAL, DECODE_GOAL = 20, 2
PARITY = 0.95  # two engines that are started alike differ by some percent
BATCHES = ((1, 1024), (8, 1024), (32, 256), (32, 1024))  # requests, tokens of context
DECODE_ROUNDS = 7
TOKENS = 64
PROMPTS = {512: 25, 2048: 15, 8192: 9}  # tokens -> rounds
ALONE = (
    Pass(f"prefix hit, {LONG} cached + {TAIL} new", requests=1, cached=LONG, new=TAIL, at_least=HIT_GOAL),
    *(
        Pass(f"decode, batch {size}, context {context}", requests=size, cached=context, new=1, at_least=DECODE_GOAL)
        for size, context in BATCHES
        if size > 1
    ),
    Pass("prefill of 2048 new tokens", requests=1, cached=0, new=2048, at_least=PARITY),
)

PLOTS = (
    Plot(
        "hits",
        f"A prefix hit: cached prefix and {TAIL} new tokens",
        "tokens of the prefix",
        "ms",
        rf"prefix hit, (?P<x>\d+) cached \+ {TAIL} new, ms",
        "torch_native",
        "cpu_attention",
    ),
)

Engines = Mapping[str, EngineClient]
Timed = Callable[[EngineClient], Awaitable[float]]


async def ask(engine: EngineClient, ids: Sequence[int], tokens: int = 1) -> int:
    """Ask for one greedy answer of `tokens` tokens; return how many of its prompt came from the cache."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = await engine.generate({"input_ids": list(ids), "sampling_params": sampling})
    return int(answer["meta_info"]["cached_tokens"])


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


async def in_turns(engines: Engines, number: int, work: Timed) -> dict[str, float]:
    """Return for each side what `work` measures on its engine, in turn; the first one changes with `number`."""
    sides = list(engines)
    return {side: await work(engines[side]) for side in (sides if number % 2 else sides[::-1])}


async def hit_round(engines: Engines, number: int, prefix: Sequence[int], rng: random.Random) -> dict[str, float]:
    """Return the ms of a prefix hit. Raises BenchError where the prefix wasn't in the cache, so there was no hit."""
    prompt = [*prefix, *text(rng, TAIL)]

    async def timed(engine: EngineClient) -> float:
        started = time.perf_counter()
        found = await ask(engine, prompt)
        taken = 1000 * (time.perf_counter() - started)
        if not len(prefix) <= found < len(prefix) + TAIL // 2:  # tails may begin alike by chance
            raise BenchError(f"{engine.name} found {found} of {len(prefix)} tokens in its cache")
        return taken

    return await in_turns(engines, number, timed)


async def prefill_round(engines: Engines, number: int, length: int, rng: random.Random) -> dict[str, float]:
    """Return the ms of a prompt that neither engine has seen."""
    prompt = text(rng, length)

    async def timed(engine: EngineClient) -> float:
        started = time.perf_counter()
        found = await ask(engine, prompt)
        taken = 1000 * (time.perf_counter() - started)
        if found > TAIL:
            raise BenchError(f"{engine.name} found {found} tokens of a new prompt in its cache")
        return taken

    return await in_turns(engines, number, timed)


async def decode_round(engines: Engines, number: int, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the tokens per second of decoding alone: a batch with TOKENS more to sample takes that much longer."""

    async def batch(engine: EngineClient, tokens: int) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(ask(engine, ids, tokens) for ids in prompts))
        return time.perf_counter() - started

    async def timed(engine: EngineClient) -> float:
        short_s, long_s = await batch(engine, 1), await batch(engine, 1 + TOKENS)
        if long_s <= short_s:
            raise BenchError(f"{engine.name}: {TOKENS} tokens more took no time: this machine is too busy")
        return len(prompts) * TOKENS / (long_s - short_s)

    return await in_turns(engines, number, timed)


def sides(found: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Return (peer, ours) of the rounds after the first, which warms up."""
    return [r["peer"] for r in found[1:]], [r["ours"] for r in found[1:]]


async def hit_rows(engines: Engines, rng: random.Random, prefixes: Mapping[int, int]) -> list[Row]:
    rows = []
    for length, rounds in prefixes.items():
        await flush(engines)
        prefix = text(rng, length)
        for engine in engines.values():
            await ask(engine, prefix)
        peer, ours = sides([await hit_round(engines, n, prefix, rng) for n in range(rounds + 1)])
        goal = HIT_GOAL if length >= LONG else None
        rows.append(cost_row(f"prefix hit, {length} cached + {TAIL} new, ms", peer, ours, at_least=goal))
    return rows


async def prefill_rows(engines: Engines, rng: random.Random, prompts: Mapping[int, int]) -> list[Row]:
    rows = []
    for length, rounds in prompts.items():
        await flush(engines)
        peer, ours = sides([await prefill_round(engines, n, length, rng) for n in range(rounds + 1)])
        rows.append(cost_row(f"prefill of {length} new tokens, ms", peer, ours, at_least=PARITY))
    return rows


async def decode_rows(
    engines: Engines,
    rng: random.Random,
    batches: Sequence[tuple[int, int]],
    rounds: int,
) -> list[Row]:
    rows = []
    for size, context in batches:
        await flush(engines)
        prompts = [text(rng, context) for _ in range(size)]
        for engine in engines.values():  # so that the timed ones find their prompts, on both sides
            await asyncio.gather(*(ask(engine, ids) for ids in prompts))
        peer, ours = sides([await decode_round(engines, n, prompts) for n in range(rounds + 1)])
        rows.append(speed_row(f"decode, batch {size}, context {context}, tokens/s", peer, ours, size > 1))
    return rows


def speed_row(case: str, peer: Sequence[float], ours: Sequence[float], counts: bool) -> Row:
    """Make the row of a speed in tokens per second: more is better. Only batches have a goal."""
    times = ratio(median(ours), median(peer))
    goal, holds = (f"at least {DECODE_GOAL} times", (times or 0.0) >= DECODE_GOAL) if counts else ("-", True)
    return Row(case, short(median(peer)), short(median(ours)), times, goal, holds, spread(peer), spread(ours))


async def flush(engines: Engines) -> None:
    for engine in engines.values():
        await engine.flush()


async def bench_attention(log: Log, rows: list[Row], parts: Collection[str] = PARTS) -> None:
    """Add all rows to `rows`. Takes some minutes. Raises EngineStartError, EngineError or BenchError."""
    if set(parts) - {"alone"}:
        await _on_engines(log, rows, parts)
    if "alone" in parts:
        for heads in (TINY, SMOLLM2):
            log(f"alone, {heads.name}")
            report_rows(alone_rows(heads, ALONE), rows, log)


async def _on_engines(log: Log, rows: list[Row], parts: Collection[str]) -> None:
    rng = random.Random(0)
    hooks = {"peer": tuple(h for h in DEFAULT_HOOKS if h != HOOK), "ours": DEFAULT_HOOKS}
    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        model = make_tiny_model(Path(folder) / "tiny", max_positions=32768)
        log("starting two engines")
        settings = {"chunked_prefill_size": 32768, "max_total_tokens": 65536}
        async with running_engines(model, Path(folder), "attention", hooks, **settings) as engines:
            await ask(engines["ours"], [1, 2, 3])  # the hook is active once a runner has used it
            status = {side: (await engine.reports())[0].hooks.get(HOOK) for side, engine in engines.items()}
            if status != {"peer": None, "ours": ACTIVE}:
                raise BenchError(f"the hook {HOOK} is {status['ours']!r} on this SGLang; there is nothing to compare")
            measures = {
                "hits": partial(hit_rows, engines, rng, PREFIXES),
                "decode": partial(decode_rows, engines, rng, BATCHES, DECODE_ROUNDS),
                "prefill": partial(prefill_rows, engines, rng, PROMPTS),
            }
            for part, measure in measures.items():
                if part in parts:
                    log(part)
                    report_rows(await measure(), rows, log)
