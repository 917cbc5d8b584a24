"""`reef-slime bench swa` compares SGLang as it is with SGLang with anchors: fan-out over a shared prompt, hybrid model.

Three pairs of real engines on this CPU, one pair at a time, each a tiny model with a window of 128 tokens. Both engines
of a pair get the same requests, one after the other in turn, so that neither runs while the other is timed. `peer` is
the engine without the hook `swa_anchors`. Reuse is the share of the tokens that a prompt shares with earlier ones.

    wide     one chunk takes a full prompt     all rows of reuse, and the wall time
    roomy    6000 sliding-window slots         slots for one prompt; a parked head
    tight    3000 sliding-window slots         too small for what is asked: the same answers, no error
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.bench.catalog import Log
from slime_backend.bench.engines import running_engines
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import BenchError, Row, cost_row, ratio, report_rows
from slime_backend.engine_client import EngineClient
from slime_backend.engine_plugin.anchor_plan import grid
from slime_backend.engine_process import DEFAULT_HOOKS
from slime_backend.simulation.models import ASSISTANT, END, SYSTEM, USER, byte_tokenizer, make_tiny_model
from slime_backend.wire import ACTIVE, ANCHORS_HOOK, ANCHORS_KEY, KvEvidence

WINDOW = 128
KEPT = WINDOW + 1  # slots that SGLang keeps behind a checkpoint: the window, and one for a prompt that ends there
HEAD = 8192
SHORTER = (512, 2048)  # heads, for the wall time of a fan-out
WALL_TIMES = 5  # the goal, with the longest
OFF_GRID = 7777  # a head that no grid position happens to end at
ROUNDS = 5
TAILS = range(1, 401)
TAILED = 701  # the head before each of them; one chunk holds both
TOLERANCE = 1e-5
PARTS = ("wide", "roomy", "tight")

PLOTS = (
    Plot(
        "fan-out",
        "The second prompt behind a shared head, up to its second token",
        "tokens of the head",
        "ms",
        r"first fan-out behind (?P<x>\d+) shared tokens, ms",
        "SGLang as it is",
        "swa_anchors",
    ),
)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    found: int  # tokens of the prompt that came from the cache
    computed: int
    seconds: float
    output: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Side:
    client: EngineClient

    async def ask(self, ids: Sequence[int], tokens: int = 16, anchors: Sequence[int] | None = None) -> TimedAnswer:
        custom = {} if anchors is None else {"custom_params": {ANCHORS_KEY: list(anchors)}}
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **custom}
        start = time.perf_counter()
        body = await self.client.generate({"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling})
        seconds = time.perf_counter() - start
        meta = body["meta_info"]
        found = int(meta["cached_tokens"])
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return TimedAnswer(found, len(ids) - found, seconds, body["output_ids"], logprobs)

    async def kv(self) -> KvEvidence:
        return (await self.client.reports())[0].kv

    async def used(self) -> int:
        kv = await self.kv()
        return kv.swa_capacity - kv.swa_free


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair is the same engine without the hook and with it."""

    peer: Side
    ours: Side

    async def ask(self, ids: Sequence[int], **options: Any) -> tuple[TimedAnswer, TimedAnswer]:
        return await self.peer.ask(ids, **options), await self.ours.ask(ids, **options)

    async def flush(self) -> None:
        for side in (self.peer, self.ours):
            await side.client.flush()


@asynccontextmanager
async def running_pair(model: Path, logs: Path, name: str, **settings: Any) -> AsyncIterator[Pair]:
    """Start both engines and end them at the end. Raises EngineStartError, BenchError."""
    hooks = {"peer": DEFAULT_HOOKS, "ours": (*DEFAULT_HOOKS, ANCHORS_HOOK)}
    async with running_engines(model, logs, name, hooks, **settings) as engines:
        status = [(await client.reports())[0].hooks.get(ANCHORS_HOOK) for client in engines.values()]
        if status != [None, ACTIVE]:
            raise BenchError(f"the hook {ANCHORS_HOOK} is {status[1]!r} on this SGLang; there is nothing to compare")
        yield Pair(Side(engines["peer"]), Side(engines["ours"]))


class Prompts:
    """This makes prompts of random bytes in the tiny model's chat template; no two heads are alike."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        tokenizer = byte_tokenizer()
        self._mark = {name: tokenizer.convert_tokens_to_ids(name) for name in (END, SYSTEM, USER, ASSISTANT)}

    def text(self, length: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(length)]

    def head(self, length: int) -> list[int]:
        """Return `length` tokens that the questions of one system prompt begin with."""
        return [self._mark[SYSTEM], *self.text(length - 3), self._mark[END], self._mark[USER]]

    def turn(self, length: int) -> list[int]:
        """Return a user's text, up to where the reply begins."""
        return [*self.text(length), self._mark[END], self._mark[ASSISTANT]]

    def next_turn(self, length: int) -> list[int]:
        return [self._mark[END], self._mark[USER], *self.turn(length)]


def reuse_row(case: str, shared: int, answers: Sequence[tuple[TimedAnswer, TimedAnswer]], goal: float | None) -> Row:
    """Make the row of the worst share that each side found; `goal` None: no less than the peer."""
    peer, ours = (min(a.found for a in side) / shared for side in zip(*answers, strict=True))
    computed = [sum(a.computed for a in side) for side in zip(*answers, strict=True)]
    wanted = peer if goal is None else goal
    words = "no less than the peer" if goal is None else f"at least {goal:g}"
    return Row(case, round(peer, 4), round(ours, 4), ratio(*computed), words, ours >= wanted)


def wall_row(shared: int, pairs: Sequence[tuple[TimedAnswer, TimedAnswer]], at_least: float | None) -> Row:
    """Make the row of the time of a head's second prompt, up to its second token."""
    peer, ours = ([1000 * answer.seconds for answer in side] for side in zip(*pairs, strict=True))
    return cost_row(f"first fan-out behind {shared} shared tokens, ms", peer, ours, at_least=at_least)


async def wide_rows(pair: Pair, prompts: Prompts, log: Log) -> list[Row]:
    rows: list[Row] = []
    firsts, seconds, appends, dropped = [], [], [], []
    shorter: dict[int, list[tuple[TimedAnswer, TimedAnswer]]] = {length: [] for length in SHORTER}
    for i in range(ROUNDS):
        log(f"fan-out {i + 1}/{ROUNDS}")
        head = prompts.head(HEAD)
        await pair.ask(head + prompts.turn(300))
        firsts.append(await pair.ask(head + prompts.turn(80), tokens=2))
        history = head + prompts.turn(400)
        answers = await pair.ask(history, tokens=64)
        seconds.append(answers)
        # The peer's reply for both: the histories must be alike.
        appends.append(await pair.ask(history + answers[0].output + prompts.next_turn(100)))
        dropped.append(await pair.ask(history + prompts.next_turn(90)))
        for length, pairs in shorter.items():
            other = prompts.head(length)
            await pair.ask(other + prompts.turn(300))
            pairs.append(await pair.ask(other + prompts.turn(80), tokens=2))
    rows.append(reuse_row(f"first fan-out, system prompt of {HEAD}, found without a hint", HEAD, firsts, 0.99))
    rows.append(reuse_row("second fan-out", HEAD, seconds, None))
    rows.append(reuse_row("append: history, reply, new turn", HEAD + 402 + 64, appends, None))
    rows.append(reuse_row("append with the reasoning dropped", HEAD + 402, dropped, None))
    rows += [wall_row(length, pairs, None) for length, pairs in shorter.items()]
    rows.append(wall_row(HEAD, firsts, WALL_TIMES))

    log("hints and the grid")
    raw = prompts.text(OFF_GRID)
    await pair.ask(raw + prompts.text(300), anchors=[len(raw)])
    hinted = await pair.ask(raw + prompts.text(80), anchors=[len(raw)])
    rows.append(reuse_row("first fan-out, no chat template, hint", len(raw), [hinted], 0.99))
    raw = prompts.text(9000)
    await pair.ask(raw + prompts.text(300))
    guessed = await pair.ask(raw + prompts.text(80))
    last = max(step for step in grid(len(raw) + 300, 4) if step <= len(raw))
    rows.append(
        reuse_row("first fan-out, neither template nor hint: the grid", len(raw), [guessed], round(last / 9000, 4))
    )

    log("sessions")
    head = prompts.head(OFF_GRID)
    await pair.ask(head + prompts.turn(200))
    sessions = [await pair.ask(head + prompts.turn(200 + i)) for i in range(4)]
    rows.append(reuse_row(f"four sessions, one system prompt of {OFF_GRID} (the worst)", OFF_GRID, sessions, 0.99))
    rows.append(await eight_at_once(pair, prompts))

    shortest: list[tuple[TimedAnswer, TimedAnswer]] = []
    for tail in TAILS:
        if tail % 50 == 0:
            log(f"tail lengths {tail}/{TAILS[-1]}")
        raw = prompts.text(TAILED)
        await pair.ask(raw + prompts.text(tail), anchors=[TAILED], tokens=2)
        shortest.append(await pair.ask(raw + prompts.text(tail), anchors=[TAILED], tokens=2))
    rows.append(reuse_row(f"every tail length 1..{TAILS[-1]}, head of {TAILED} (the worst)", TAILED, shortest, 0.99))
    return rows


async def eight_at_once(pair: Pair, prompts: Prompts) -> Row:
    """Run eight sessions of one new head and count those that find it, in one wave of requests or in two."""
    head = prompts.head(HEAD)
    waves = [[head + prompts.turn(300 + i + 10 * wave) for i in range(8)] for wave in range(2)]
    found, computed, needed = [], [], []
    for side in (pair.peer, pair.ours):
        cost = reusing = used = 0
        while reusing < 7 and used < len(waves):
            answers = await asyncio.gather(*(side.ask(ids) for ids in waves[used]))
            reusing = sum(a.found >= 0.99 * HEAD for a in answers)
            cost += sum(a.computed for a in answers)
            used += 1
        found.append(reusing)
        computed.append(cost)
        needed.append(used)
    case = f"eight sessions at once: how many reuse (waves: {needed[0]}, {needed[1]})"
    return Row(case, found[0], found[1], ratio(*computed), "at least 7", found[1] >= 7)


async def roomy_rows(pair: Pair, prompts: Prompts, log: Log) -> list[Row]:
    log("slots")
    await pair.flush()
    await pair.ask(prompts.head(7000) + prompts.text(300), tokens=8)
    peer, ours = await pair.peer.used(), await pair.ours.used()
    goal = f"at most the peer's + {KEPT}: one anchor, window + 1 as SGLang keeps it"
    rows = [
        Row(
            "window slots for a prompt of 7300, chunks of 2048",
            peer,
            ours,
            ratio(peer, ours),
            goal,
            ours <= peer + KEPT,
        )
    ]
    log("a parked session")
    await pair.flush()
    parked = prompts.head(HEAD)
    await pair.ask(parked + prompts.turn(300))
    for _ in range(5):
        await pair.ask(prompts.head(HEAD) + prompts.turn(300))
    back = await pair.ask(parked + prompts.turn(80))
    rows.append(reuse_row("a parked head after five others, 6000 slots", HEAD, [back], 0.99))
    return rows


async def tight_rows(pair: Pair, prompts: Prompts, log: Log) -> list[Row]:
    log("a pool that is too small")
    heads = [prompts.head(3500) for _ in range(5)]
    alone = [head + prompts.turn(n) for head in heads for n in (60, 70)]
    at_once = [heads[-1] + prompts.turn(80 + i) for i in range(8)]
    distinct = [prompts.head(1750) + prompts.turn(40) for _ in range(8)]
    answers: list[list[TimedAnswer]] = []
    peaks = []
    for side in (pair.peer, pair.ours):
        peak = asyncio.create_task(watch_peak(side))
        got = [await side.ask(ids) for ids in alone]
        for group in (at_once, distinct):
            got += await asyncio.gather(*(side.ask(ids) for ids in group))
        peak.cancel()
        peaks.append(await peak)
        answers.append(got)
    pairs = list(zip(*answers, strict=True))
    same = sum(a.output == b.output and _close(a.logprobs, b.logprobs) for a, b in pairs)
    capacity = (await pair.ours.kv()).swa_capacity
    return [
        Row(
            "pool of 3000 slots: answers like the peer's",
            len(pairs),
            same,
            None,
            f"all {len(pairs)}",
            same == len(pairs),
        ),
        Row(
            "pool of 3000 slots: most in use at once",
            peaks[0],
            peaks[1],
            None,
            f"at most {capacity}",
            peaks[1] <= capacity,
        ),
    ]


async def watch_peak(side: Side) -> int:
    """Return the most slots in use that any poll found, once cancelled."""
    peak = 0
    try:
        while True:
            peak = max(peak, await side.used())
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return peak


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return max(abs(a - b) for a, b in zip(first, second, strict=True)) < TOLERANCE


async def bench_swa(log: Log, rows: list[Row], parts: Collection[str] = PARTS) -> None:
    """Add all rows to `rows`, those of each pair as soon as it is done. Takes some minutes.

    Raises EngineStartError, EngineError or BenchError.
    """
    prompts = Prompts()
    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        model = make_tiny_model(Path(folder) / "tiny-hybrid", hybrid=True, max_positions=32768)
        for name, measure, settings in (
            ("wide", wide_rows, {"chunked_prefill_size": 16384, "max_total_tokens": 65536}),
            ("roomy", roomy_rows, {"chunked_prefill_size": 2048, **pool(60000, 6000)}),
            ("tight", tight_rows, {"chunked_prefill_size": 1024, **pool(40000, 3000)}),
        ):
            if name not in parts:
                continue
            log(f"starting two engines: {name}")
            async with running_pair(model, Path(folder), name, **settings) as pair:
                measured = await measure(pair, prompts, log)
            report_rows(measured, rows, log)


def pool(full: int, sliding: int) -> dict[str, Any]:
    """Return engine settings for this many slots of each kind."""
    return {"max_total_tokens": full, "extra": ("--swa-full-tokens-ratio", str(sliding / full))}
