"""`reef-slime bench fleet` measures what a publication costs its controller, over 1 to 1024 fake engines.

The fake engines live in a process of their own, answer each call 20 ms after they got it, and hold no model and no
requests: what is measured is our side, so N engines should take little longer than one. They need the machine's cores
as well, so on few cores the times are upper bounds; the controller's own CPU time doesn't depend on that.

    growth   `retract` and `scoped`, on fleets of every size in turns; no bytes are moved
    faults   64 engines and one that is slow, dead or hung, and the same publication on 65 healthy ones
    clients  pause, flush and reports by our HTTP client and aiohttp's, in turns; these engines answer at once

    slow     answers each call after 0.5 s
    dead     its connections break at the pause, and from then on
    hung     accepts the calls of the pause and the resume and carries out and answers neither; each has a deadline of
             2 s here
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median

from slime_backend.bench.catalog import Log
from slime_backend.bench.clients import client_rows, time_clients
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import BenchError, Row, Spread, cost_row, ratio, report_rows, short, spread
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import PrefixSharing, decide
from slime_backend.publication import PublicationReport, publish
from slime_backend.simulation.fake_engine import Fault
from slime_backend.simulation.fleet_process import fake_engines
from slime_backend.simulation.transport import NameTransport

PARTS = ("growth", "faults", "clients")
SIZES = (1, 4, 16, 64, 256, 1024)
LATENCY_S = 0.02
STEP_S = 60.0  # of decoding; there are no requests, and a thousand engines that poll for some take the machine's CPU
ROUNDS = 9
TWICE = 256  # engines that take at most twice as long as one
HEALTHY = 64
SLOW_S = 0.5
DEADLINE_S = 2.0  # of a pause, and of any control call, where an engine may hang
GRACE_S = 0.5  # for what comes before and after a deadline
FAULT_ROUNDS = 5
CLIENT_SIZES, CLIENT_ROUNDS = (1, 16, 64, 256), 25
WAYS: tuple[PrefixSharing, ...] = ("retract", "scoped")

PLOTS = (
    Plot(
        "growth",
        "Pause to resumed and verified, no bytes, fake engines that answer after 20 ms",
        "engines",
        "ms",
        r"pause to resumed and verified, (?P<x>\d+) engines?, retract beside scoped, ms",
        "retract",
        "scoped",
    ),
    Plot(
        "cpu",
        "The controller's CPU time for one publication",
        "engines",
        "ms",
        r"the controller's CPU for a publication, (?P<x>\d+) engines?, retract beside scoped, ms",
        "retract",
        "scoped",
    ),
)


@dataclass(slots=True)
class Times:
    """These are one fleet's times in one way: ms in each round."""

    verified: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # this process's
    line_kib: list[float] = field(default_factory=list)  # size of the report in publications.jsonl


async def time_growth(groups: Mapping[int, Sequence[str]], rounds: int) -> dict[tuple[int, PrefixSharing], Times]:
    """Return (size, way) -> times. In each round every group publishes in each way; one round more warms up.

    Raises BenchError where a publication isn't confirmed by every engine, PublicationError where by none.
    """
    async with AsyncExitStack() as stack:
        fleets: dict[tuple[int, PrefixSharing], Fleet] = {}
        for size, urls in groups.items():
            clients = [await stack.enter_async_context(EngineClient(url)) for url in urls]
            for way in WAYS:
                fleets[size, way] = fleet = Fleet(decide("disjoint", way), "v0")
                for client in clients:
                    await admit(fleet, client)
        times = {case: Times() for case in fleets}
        for number in range(rounds + 1):
            for (size, way), fleet in fleets.items():
                before = time.process_time()
                report = await publish(fleet, NameTransport(), f"{way}-{number + 1}")
                cpu = 1000 * (time.process_time() - before)
                if report.unconfirmed:
                    raise BenchError(f"a publication failed: {report.unconfirmed}")
                if number:
                    found = times[size, way]
                    found.verified.append(report.verified_ms or 0.0)
                    found.resumed.append(report.wall_ms)
                    found.cpu.append(cpu)
                    found.line_kib.append(len(json.dumps(report.to_json())) / 1024)
        return times


def growth_rows(times: Mapping[tuple[int, PrefixSharing], Times]) -> list[Row]:
    rows: list[Row] = []
    sizes = sorted({size for size, _ in times})
    smallest = sizes[0]
    for size in sizes:
        engines = f"{size} engine{'s' * (size > 1)}"
        one, many = times[smallest, "retract"].verified, times[size, "retract"].verified
        if size != smallest:
            rows.append(growth_row(f"pause to verified, retract, {smallest} beside {engines}, ms", one, many, size))
        retract, scoped = times[size, "retract"], times[size, "scoped"]
        rows.append(
            cost_row(
                f"pause to resumed and verified, {engines}, retract beside scoped, ms", retract.resumed, scoped.resumed
            )
        )
        what = f"the controller's CPU for a publication, {engines}, retract beside scoped, ms"
        rows.append(cost_row(what, retract.cpu, scoped.cpu))
        what = f"a line of publications.jsonl, {engines}, retract beside scoped, KiB"
        rows.append(cost_row(what, retract.line_kib, scoped.line_kib))
    return rows


def growth_row(case: str, one: Sequence[float], many: Sequence[float], size: int) -> Row:
    times = median(many) / median(one)
    goal, holds = ("at most twice as long", times <= 2) if size == TWICE else ("-", True)
    return Row(
        case,
        short(median(one)),
        short(median(many)),
        ratio(median(one), median(many)),
        goal,
        holds,
        spread(one),
        spread(many),
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind is the fault of the one engine that isn't well."""

    name: str
    latency_s: float = LATENCY_S
    faults: Mapping[str, Sequence[Fault]] = field(default_factory=dict)
    retired: bool = True  # whether it must be
    # How long the others may wait for it, beyond their time when all are well.
    waits_s: float = 0.0


KINDS = (
    Kind("well", retired=False),
    Kind("slow", latency_s=SLOW_S, retired=False, waits_s=7 * SLOW_S),  # the calls before the resume
    Kind("dead", faults={"/pause_generation": ["die"]}),
    Kind(
        "hung",
        faults={"/pause_generation": ["hang_before"], "/continue_generation": ["hang_before"] * 3},
        waits_s=DEADLINE_S,
    ),
)


@dataclass(slots=True)
class Outcome:
    """This is the outcome of one kind in one way, over the rounds."""

    others_ms: list[float] = field(default_factory=list)  # how long the slowest of the others was paused
    decided_ms: list[float] = field(default_factory=list)  # until the publication returned
    as_expected: bool = True  # the others resumed at the new version, the one retired or not


async def time_fault(
    healthy: Sequence[str], patients: Sequence[str], kind: Kind, way: PrefixSharing, tag: str
) -> Outcome:
    """Publish once with each of `patients` as the one faulty engine."""
    deadlines = Deadlines(pause=DEADLINE_S, flush=DEADLINE_S, load=DEADLINE_S, control=DEADLINE_S)
    outcome = Outcome()
    async with AsyncExitStack() as stack:
        fleet = Fleet(decide("disjoint", way), "v0")
        for url in healthy:
            await admit(fleet, await stack.enter_async_context(EngineClient(url, deadlines=deadlines)))
        for number, url in enumerate(patients):
            client = await stack.enter_async_context(EngineClient(url, deadlines=deadlines))
            odd = await admit(fleet, client)
            started = time.perf_counter()
            report = await publish(fleet, NameTransport(), f"{tag}-{number}")
            decided = 1000 * (time.perf_counter() - started)
            outcome.others_ms.append(longest_pause(report, odd.name))
            outcome.decided_ms.append(decided)
            retired = [odd.name] if kind.retired else []
            outcome.as_expected &= list(report.unconfirmed) == retired and list(fleet.retired()) == retired
            fleet.forget(odd)
    return outcome


def longest_pause(report: PublicationReport, but: str) -> float:
    return max(engine.paused_ms or float("inf") for engine in report.engines if engine.engine != but)


def fault_rows(kind: Kind, way: PrefixSharing, well: Outcome, found: Outcome) -> list[Row]:
    bound = median(well.others_ms) + 1000 * (kind.waits_s + GRACE_S)
    end = "it is retired" if kind.retired else "nothing is retired"
    case = f"the {HEALTHY} others stand still, one {kind.name}, {way}, ms"
    goal = f"all others resume at the new version within {bound:.0f}, {end}"
    holds = found.as_expected and median(found.others_ms) <= bound
    decided = f"until the publication returns, one {kind.name}, {way}, ms"
    return [
        fault_row(case, well.others_ms, found.others_ms, goal, holds),
        fault_row(decided, well.decided_ms, found.decided_ms, "-", True),
    ]


def fault_row(case: str, well: Sequence[float], found: Sequence[float], goal: str, holds: bool) -> Row:
    around: tuple[Spread | None, Spread | None] = (spread(well), spread(found))
    times = ratio(median(well), median(found))
    return Row(case, short(median(well)), short(median(found)), times, goal, holds, *around)


async def bench_fleet(log: Log, rows: list[Row], parts: Collection[str] = PARTS) -> None:
    """Add all rows to `rows`. Takes some five minutes. Raises TimeoutError, EngineError or BenchError."""

    if "growth" in parts:
        log(f"starting {sum(SIZES)} fake engines")
        with fake_engines(sum(SIZES), latency_s=LATENCY_S, token_s=STEP_S) as urls:
            log("measuring")
            report_rows(growth_rows(await time_growth(grouped(urls, SIZES), ROUNDS)), rows, log)
    if "faults" in parts:
        with fake_engines(HEALTHY, latency_s=LATENCY_S, token_s=STEP_S) as healthy:
            for way in WAYS:
                found: dict[str, Outcome] = {}
                for kind in KINDS:
                    log(f"{way}: one {kind.name}")
                    latency_s, faults = kind.latency_s, kind.faults
                    with fake_engines(FAULT_ROUNDS, faults=faults, latency_s=latency_s, token_s=STEP_S) as patients:
                        found[kind.name] = await time_fault(healthy, patients, kind, way, f"{way}-{kind.name}")
                for kind in KINDS[1:]:
                    report_rows(fault_rows(kind, way, found["well"], found[kind.name]), rows, log)
    if "clients" in parts:
        with fake_engines(max(CLIENT_SIZES), token_s=STEP_S) as urls:
            for size in CLIENT_SIZES:
                log(f"clients: {size}")
                report_rows(client_rows(size, await time_clients(urls[:size], CLIENT_ROUNDS)), rows, log)


def grouped(urls: Sequence[str], sizes: Sequence[int]) -> dict[int, list[str]]:
    """Return size -> that many of the URLs, none twice."""
    groups, start = {}, 0
    for size in sizes:
        groups[size] = list(urls[start : start + size])
        start += size
    return groups
