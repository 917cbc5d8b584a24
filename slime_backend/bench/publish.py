"""`reef-slime bench publish` measures how long a publication pauses the engines, without the bytes.

Three ways on the same engines and under the same load, in turns:

    slime    slime's sequence at every update: pause (`abort`), flush, resume; HTTP 200 counts as done
    retract  our transaction: pause (`retract`), flush, each scheduler's evidence, label, resume
    scoped   our transaction: pause in place, evidence of the pause, label, evidence of the sweep, resume

The load: a fixed number of requests in flight on each engine, of 48 prompt and 256 output tokens; each is sent again as
soon as it ends, also by an abort. Each pause begins once nine in ten of them decode. An abort pause asks once a
second whether anything still runs; that is the peer's second. "Resumed" is the last resume's answer in all three; ours
then ask each scheduler whether it runs, and it does meanwhile. The engines serve a tiny model, so a pause waits for a
short step; the controller, the clients of the load and the engines share this machine's cores.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from slime_backend.bench.catalog import Log
from slime_backend.bench.engines import running_engines
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import BenchError, Row, cost_row, report_rows
from slime_backend.bench.slime_sequence import Stop, slime_sequence
from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import RUN_HOOKS
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationReport, Step, publish
from slime_backend.simulation.models import make_tiny_model

PARTS = ("load", "engines", "eight")
ROUNDS = 9
IN_FLIGHT = (1, 8, 32, 128, 512)  # on one engine
USUAL = 32  # on each of several engines, and for the split
ENGINES = {"engines": (1, 2, 4), "eight": (8,)}  # part -> how many at once
ENGINE_ROUNDS = 5
ENGINE_GIB = 2.0  # memory of one engine
TIMES, UNDER_MS = 30, 30  # the goals, for pause to verified
PROMPT, REPLY = 48, 256  # tokens
SETTLED = 0.9  # of the requests must decode: some are always about to be sent again
SETTLED_S = 60.0

PLOTS = (
    Plot(
        "load",
        "Pause to verified on one engine",
        "requests in flight",
        "ms",
        r"pause to flushed \(ours: verified\), 1 engine, (?P<x>\d+) in flight, ms",
        "slime: abort, flush",
        "retract, flush, evidence",
    ),
    Plot(
        "engines",
        f"Pause to verified, {USUAL} requests in flight on each engine",
        "engines",
        "ms",
        rf"pause to flushed \(ours: verified\), (?P<x>\d+) engines? together, {USUAL} in flight on each, ms",
        "slime: abort, flush",
        "retract, flush, evidence",
    ),
)


class NoBytes:
    """This Transport moves nothing: what is left is the publication itself."""

    name = "none"
    counted = False

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        return None

    async def load(self, client: EngineClient, version: str) -> None:
        return None

    async def close(self) -> None:
        return None


@dataclass(slots=True)
class Load:
    """The load keeps `wanted` requests in flight on each engine; aborted ones are counted and sent again."""

    clients: Sequence[EngineClient]
    wanted: int
    aborted: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._tasks = [
            asyncio.create_task(self._keep(client, random.Random(i)))
            for client in self.clients
            for i in range(self.wanted)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self.clients:
            await client.abort_all()

    async def _keep(self, client: EngineClient, rng: random.Random) -> None:
        tokens = rng.randrange(1, REPLY)  # the first answers end at different times, so the later ones do too
        while True:
            ids = [rng.randrange(256) for _ in range(PROMPT)]
            sampling = {"max_new_tokens": tokens, "ignore_eos": True}
            answer = await client.generate({"input_ids": ids, "sampling_params": sampling})
            self.aborted += answer["meta_info"]["finish_reason"]["type"] == "abort"
            tokens = REPLY

    async def settled(self) -> None:
        """Return once every engine decodes as many as it should. Raises BenchError after a minute."""
        until = time.monotonic() + SETTLED_S
        while True:
            for task in self._tasks:
                if task.done():
                    task.result()  # raises why a request failed
            running = [sum(r.kv.running for r in await client.reports()) for client in self.clients]
            if min(running) >= SETTLED * self.wanted:
                return
            if time.monotonic() > until:
                raise BenchError(f"only {min(running)} of {self.wanted} requests run after {SETTLED_S:g} s")
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Measured:
    """`in_turns` measured this in each round."""

    engines: int
    in_flight: int  # on each engine
    slime: list[Stop] = field(default_factory=list)
    retract: list[PublicationReport] = field(default_factory=list)
    scoped: list[PublicationReport] = field(default_factory=list)
    aborted_by_slime: list[float] = field(default_factory=list)  # requests
    aborted_by_us: list[float] = field(default_factory=list)


async def in_turns(clients: Sequence[EngineClient], in_flight: int, rounds: int) -> Measured:
    """Measure each of the three ways under the same load, `rounds` times after one round that isn't counted.

    Raises BenchError where a publication isn't confirmed by every engine, PublicationError where by none.
    """
    retract, scoped = (Fleet(decide("disjoint", sharing), "start") for sharing in ("retract", "scoped"))
    for client in clients:
        await admit(retract, client)
        await admit(scoped, client)
    found = Measured(len(clients), in_flight)
    async with Load(clients, in_flight) as load:
        for number in range(rounds + 1):
            before = load.aborted
            await load.settled()
            stop = await slime_sequence(clients)
            await load.settled()
            after_slime = load.aborted
            reports = []
            for fleet, name in ((retract, "retract"), (scoped, "scoped")):
                report = await publish(fleet, NoBytes(), f"{name}-{number}")
                if report.unconfirmed:
                    raise BenchError(f"a publication failed: {report.unconfirmed}")
                reports.append(report)
                await load.settled()
            if number:  # the first round opens the connections
                found.slime.append(stop)
                found.retract.append(reports[0])
                found.scoped.append(reports[1])
                found.aborted_by_slime.append(after_slime - before)
                found.aborted_by_us.append(load.aborted - after_slime)
    return found


def barrier_rows(found: Measured, where: str) -> list[Row]:
    """Compare the times until every cache is flushed and, for ours, until every scheduler's counts confirm it.

    `scoped` has nothing to flush.
    """
    peer = [stop.flushed_ms for stop in found.slime]
    return [
        cost_row(f"{case}, {where}, ms", peer, [report.verified_ms or 0.0 for report in reports], at_least=TIMES)
        for case, reports in (
            ("pause to flushed (ours: verified)", found.retract),
            ("pause to flushed (ours: paused in place, verified)", found.scoped),
        )
    ]


def resumed_rows(found: Measured, where: str) -> list[Row]:
    """Compare the times until the last resume is answered.

    Ours also have the time until all schedulers' counts confirm it, while the engines work again.
    """
    peer = [stop.resumed_ms for stop in found.slime]
    rows = []
    for way, reports in (("retract", found.retract), ("scoped", found.scoped)):
        answered = [max(outcome.paused_ms or 0.0 for outcome in report.engines) for report in reports]
        rows.append(cost_row(f"pause to resumed, {way}, {where}, ms", peer, answered, at_least=1))
        verified = [report.wall_ms for report in reports]
        rows.append(cost_row(f"pause to resumed and verified, {way}, {where}, ms", None, verified))
    return rows


def split_rows(found: Measured, where: str) -> list[Row]:
    """Return where the time of our two ways goes, and what an abort throws away."""
    rows = [
        cost_row(
            f"pause to verified by itself, {way}, {where}, ms",
            None,
            [r.verified_ms or 0.0 for r in reports],
            below=UNDER_MS,
        )
        for way, reports in (("retract", found.retract), ("scoped", found.scoped))
    ]
    for way, reports in (("retract", found.retract), ("scoped", found.scoped)):
        verified: tuple[str, Step] = (
            ("flush and evidence", "flush") if way == "retract" else ("evidence of the pause", "verify")
        )
        phases: list[tuple[str, Step]] = [
            ("pause", "pause"),
            verified,
            ("label, confirmed", "label"),
            ("resume, confirmed", "resume"),
        ]
        rows += [cost_row(f"{way}: {name}, {where}, ms", None, phase(reports, step)) for name, step in phases]
    lost = median(found.aborted_by_slime), max(found.aborted_by_us)
    rows.append(Row(f"requests that a publication aborts, {where}", *lost, None, "none", lost[1] == 0))
    return rows


def phase(reports: Sequence[PublicationReport], step: Step) -> list[float]:
    """Return each report's time of the slowest engine in this step, in ms."""
    return [max(outcome.times.get(step, 0.0) for outcome in report.engines) for report in reports]


@asynccontextmanager
async def engines_on(model: Path, logs: Path, count: int) -> AsyncIterator[list[EngineClient]]:
    hooks: dict[str, Any] = {f"{i}": (*RUN_HOOKS, "scope") for i in range(count)}
    async with running_engines(model, logs, f"of-{count}", hooks, max_total_tokens=300_000) as clients:
        yield list(clients.values())


def fit_in_memory() -> int:
    """Return how many engines there is memory for now."""
    (line,) = (x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(int(line.split()[1]) / 2**20 / ENGINE_GIB)


async def bench_publish(log: Log, rows: list[Row], parts: Collection[str] = PARTS) -> None:
    """Add all rows to `rows`, those of each case as soon as it is done. Takes some ten minutes.

    As many engines as there is memory for. Raises EngineStartError, EngineError or BenchError.
    """

    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        if "load" in parts:
            log("starting one engine")
            async with engines_on(model, Path(folder), 1) as clients:
                for in_flight in IN_FLIGHT:
                    log(f"{in_flight} in flight")
                    found, where = await in_turns(clients, in_flight, ROUNDS), f"1 engine, {in_flight} in flight"
                    report_rows([*barrier_rows(found, where), *resumed_rows(found, where)], rows, log)
                    if in_flight == USUAL:
                        report_rows(split_rows(found, where), rows, log)
        for count in (count for part, counts in ENGINES.items() if part in parts for count in counts):
            if count > fit_in_memory():
                log(f"{count} engines need {count * ENGINE_GIB:g} GiB of free memory, which this machine has not")
                break
            log(f"starting {count} engines")
            async with engines_on(model, Path(folder), count) as clients:
                found = await in_turns(clients, USUAL, ENGINE_ROUNDS)
                where = f"{count} engine{'s' * (count > 1)} together, {USUAL} in flight on each"
                report_rows([*barrier_rows(found, where), *resumed_rows(found, where)], rows, log)
