"""`reef-slime bench modes` compares slime's ways to publish with ours, under the same asynchronous traffic.

    drop     slime's sequence (pause with `abort`, flush, load, resume); what it aborts is thrown away
    requeue  the same; what it aborts is sent again at once, with the tokens that it has
    retract, off, scoped    our transaction under each policy; `off` shares no prefixes

Two real engines on this CPU, started alike but for the radix cache: one serves every mode that shares prefixes, the
other `off`; one works at a time. In each round every mode gets the same requests for one slice of time; `scoped` gets
two slices, and the difference between the two is the noise of this machine. The next round's order is the reverse, so
that a machine that grows slower meanwhile changes no ratio. Before each slice the speeds of its
engine are measured for the planner, with nothing published. Sixteen requests are in flight: groups of eight share a
prompt of 256 tokens, answers are of 24 to 256. Complete cycles from publication to publication are
counted; a token that is thrown away doesn't count.

The model is large enough for its prefilled token to cost a fraction of a decoded one, as on a GPU: a tiny one decodes
at the pace of Python and prefills for nothing. The ratio of these costs is measured and printed.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_backend.bench.catalog import Log
from slime_backend.bench.engine_speeds import measure_speeds
from slime_backend.bench.engines import running_engines
from slime_backend.bench.mode_slices import run_slice
from slime_backend.bench.plots import Plot
from slime_backend.bench.rows import Row, ratio, report_rows, short
from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import DEFAULT_HOOKS
from slime_backend.planner.measured import ModeResults, Shape, Slice
from slime_backend.planner.work import MODES, Mode, groups_in_flight
from slime_backend.policy import decide
from slime_backend.simulation.models import make_tiny_model

# From 24 to 256 tokens, log-uniform. Not multiples of one number: otherwise answers that begin together end together,
# and their successors are always prefilled together.
ANSWERS = tuple(round(24 * (256 / 24) ** ((i + 0.5) / 24)) for i in range(24))
SHAPE = Shape(prompt=256, group=8, answers=ANSWERS, in_flight=16, chunk=2048)
MODEL = {"hidden_size": 256, "layers": 4}
# Seconds between the beginnings of two publications. Slime's sequence pauses for one of them here, and then
# prefills again for another one.
PARTS = {"every-4-s": 4.0, "every-6-s": 6.0, "every-12-s": 12.0}
ROUNDS = 2  # an even number, so that both orders are equally frequent
WARM_S, SLICE_S = 8.0, 24.0  # the longest answers take about as long as the first; the rest of a slice is counted
CYCLES = 4  # the least in a slice: a single one depends more on the machine than on the mode
NOISE = 0.05  # a loss of more than this in the median is a loss, whatever the spread
OTHERS: tuple[Mode, ...] = tuple(mode for mode in MODES if mode != "scoped")
# Each mode is next to a slice of `scoped`; with both orders, none of them is earlier on average.
ORDER: tuple[Mode, ...] = ("requeue", "scoped", "off", "retract", "scoped", "drop")

PLOTS = (
    Plot(
        "tokens",
        "Tokens per second of answers, 16 requests in flight",
        "seconds between two publications",
        "tokens/s",
        r"tokens per second, a publication every (?P<x>\d+) s: scoped beside requeue; .*",
        "slime: abort, sent again",
        "scoped",
    ),
    Plot(
        "prefilled",
        "Prefilled tokens for each sampled one",
        "seconds between two publications",
        "tokens",
        r"prefilled tokens for each sampled one, a publication every (?P<x>\d+) s: scoped beside requeue",
        "slime: abort, sent again",
        "scoped",
    ),
)


async def bench_modes(
    log: Log, rows: list[Row], parts: Collection[str] = tuple(PARTS), *, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Add all rows to `rows`, those of each interval as soon as it is done; some ten minutes for each.

    Returns every slice and the engine's speeds (ModeResults), for the planner. Raises EngineStartError, EngineError,
    PublicationError or BenchError.
    """
    results = ModeResults(SHAPE, MODEL)
    hooks = tuple(dict.fromkeys((*DEFAULT_HOOKS, *decide("disjoint", "scoped").needed_hooks)))
    pool = {"max_total_tokens": 4 * SHAPE.in_flight * SHAPE.longest, "chunked_prefill_size": SHAPE.chunk}
    with tempfile.TemporaryDirectory(prefix="reef-slime-bench-") as folder:
        checkpoints = [_model(Path(folder), seed) for seed in range(2)]
        log("starting two engines")
        async with (
            running_engines(checkpoints[0], Path(folder), "modes", {"sharing": hooks}, **pool) as on,
            running_engines(checkpoints[0], Path(folder), "modes", {"off": hooks}, radix_cache=False, **pool) as off,
        ):
            for interval_s in (PARTS[part] for part in PARTS if part in parts):
                await measure(on["sharing"], off["off"], results, checkpoints, log, interval_s, rounds)
                report_rows(interval_rows(results, interval_s), rows, log)
    report_rows(speed_rows(results), rows, log)
    return results.to_json()


async def measure(
    sharing: EngineClient,
    off: EngineClient,
    results: ModeResults,
    checkpoints: Sequence[Path],
    log: Log,
    interval_s: float,
    rounds: int,
    warm_s: float = WARM_S,
    slice_s: float | None = None,
) -> None:
    """Add speeds and slices to `results`: `rounds` rounds over all modes, `scoped` twice in each."""
    warm = math.ceil(warm_s / interval_s)
    slice_s = max(SLICE_S, CYCLES * interval_s) if slice_s is None else slice_s
    prompts = round(groups_in_flight(results.shape.traffic(interval_s)))
    for seed in range(rounds):
        for mode in ORDER[:: -1 if seed % 2 else 1]:
            client = off if mode == "off" else sharing
            rng = random.Random(f"speeds/{len(results.speeds)}")
            found = await measure_speeds(client, results.shape, prompts, rng, radix_cache=client is sharing)
            results.speeds.append(found)
            done = await run_slice(
                client,
                mode,
                results.shape,
                interval_s=interval_s,
                seed=seed,
                number=len(results.slices) + 1,
                checkpoints=checkpoints,
                warm=warm,
                counted=round(slice_s / interval_s) - warm,
            )
            results.slices.append(done)
            log(describe(done))


def _model(folder: Path, seed: int) -> Path:
    size = MODEL["hidden_size"]
    return make_tiny_model(folder / f"weights-{seed}", seed=seed, hidden_size=size, layers=MODEL["layers"])


def describe(found: Slice) -> str:
    return (
        f"{found.mode}, every {found.interval_s:g} s, seed {found.seed}: {found.tokens_per_s:.0f} tokens/s, "
        f"{found.prefilled_per_token:.2f} prefilled for each, paused {found.paused_ms:.0f} ms, lag "
        f"{found.lag_mean:.2f}, mixed {found.mixed_share:.2f}"
    )


def interval_rows(results: ModeResults, interval_s: float) -> list[Row]:
    """Return the rows of one interval: those with goals first."""
    every = f"a publication every {interval_s:g} s"
    slices = results.of("scoped", interval_s)  # two of each seed, one after the other
    rows = [throughput_row(mode, every, results.of(mode, interval_s), slices) for mode in OTHERS]
    rows.append(control_row(every, slices[::2], slices[1::2]))
    for mode in OTHERS:
        peer, ours = (results.median(m, interval_s, "prefilled_per_token") for m in (mode, "scoped"))
        case = f"prefilled tokens for each sampled one, {every}: scoped beside {mode}"
        rows.append(Row(case, short(peer), short(ours), ratio(peer, ours), "no more", ours <= peer))
    for mode in MODES:
        rows += plain_rows(mode, every, results, interval_s)
    return rows


def throughput_row(mode: Mode, every: str, peer: Sequence[Slice], ours: Sequence[Slice]) -> Row:
    """Compare the slices of each seed. A loss is noise where one round shows none."""
    ratios = _ratios(peer, ours)
    holds = max(ratios) >= 1 and statistics.median(ratios) >= 1 - NOISE
    case = f"tokens per second, {every}: scoped beside {mode}; ratio {min(ratios):.2f} .. {max(ratios):.2f}"
    return Row(case, *_medians(peer, ours), round(statistics.median(ratios), 2), "no less, but for noise", holds)


def control_row(every: str, first: Sequence[Slice], again: Sequence[Slice]) -> Row:
    """Compare `scoped` with itself: holds where noise can't hide a loss that counts."""
    ratios = _ratios(first, again)
    middle = statistics.median(ratios)
    case = f"tokens per second, {every}: scoped again; ratio {min(ratios):.2f} .. {max(ratios):.2f}"
    return Row(case, *_medians(first, again), round(middle, 2), "about 1", abs(middle - 1) <= NOISE)


def plain_rows(mode: Mode, every: str, results: ModeResults, interval_s: float) -> list[Row]:
    """Return a mode's figures that have no goal."""
    what: Mapping[str, str] = {
        "paused_ms": "ms from the pause to the resume",
        "lag_mean": "publications between a token and its answer's end",
        "mixed_share": "share of answers that several versions sampled",
        "thrown_away": "tokens thrown away",
    }
    return [_plain(f"{mode}, {every}: {text}", results.median(mode, interval_s, name)) for name, text in what.items()]


def speed_rows(results: ModeResults) -> list[Row]:
    """Return the engine's speeds, and how much a prefilled token costs relative to a decoded one."""
    speeds = results.typical_speeds()
    return [
        _plain("engine alone: prefilled tokens per second", speeds.prefill_tokens_per_s),
        _plain(
            f"engine alone: decoded tokens per second, {results.shape.in_flight} at once", speeds.decode_tokens_per_s
        ),
        _plain(
            "engine alone: prefilled tokens that cost as much as one decoded",
            speeds.prefill_tokens_per_s / speeds.decode_tokens_per_s,
        ),
        _plain("engine alone: ms that an admission takes besides what it prefills", speeds.admission_ms),
    ]


def _ratios(peer: Sequence[Slice], ours: Sequence[Slice]) -> list[float]:
    """Return ours / peer for each seed, in tokens per second; infinite where the peer's answers got none."""
    return [
        _mean(ours, seed) / theirs if (theirs := _mean(peer, seed)) else float("inf")
        for seed in sorted({s.seed for s in peer})
    ]


def _mean(slices: Sequence[Slice], seed: int) -> float:
    return statistics.fmean(s.tokens_per_s for s in slices if s.seed == seed)


def _medians(peer: Sequence[Slice], ours: Sequence[Slice]) -> tuple[float, float]:
    first, second = (statistics.median(s.tokens_per_s for s in side) for side in (peer, ours))
    return short(first), short(second)


def _plain(case: str, value: Any) -> Row:
    return Row(case, None, short(value), None, "-", True)
