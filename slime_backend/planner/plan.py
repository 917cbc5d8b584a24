"""`make_plan` assembles traffic and speeds from what was given, and predicts and recommends from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from slime_backend.planner import from_bench, from_ledger
from slime_backend.planner.compare import CLOSE, Cell, compare
from slime_backend.planner.measured import merge_runs, read_runs
from slime_backend.planner.predict import Prediction, predict_all
from slime_backend.planner.recommend import (
    GROUPS,
    PERIODS,
    Crossover,
    Recommendation,
    by_group,
    by_period,
    crossovers,
    recommend,
)
from slime_backend.planner.speeds import PREFILL_TO_DECODE, Speeds, of_model
from slime_backend.planner.traffic import CHUNK, PlanError, Traffic, answers_around
from slime_backend.planner.work import Mode


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag describes how a field of Given appears on the command line; its default name is the field's."""

    help: str | None = None
    name: str | None = None
    metavar: str | None = None
    positional: bool = False


Number = float | None


@dataclass(frozen=True, slots=True)
class Given:
    """These are a user's settings, None where not given; `reef-slime plan` makes its flags of them.

    Units are as in Traffic and Speeds.
    """

    run_dir: Annotated[
        Path | None,
        Flag("a recorded run; flags take precedence over its figures", metavar="[RUN_DIR]", positional=True),
    ] = None
    bench: Annotated[Path | None, Flag("speeds and traffic of reef-slime bench modes --write DIR", metavar="FILE")] = (
        None
    )
    prompt: Annotated[Number, Flag("length of a prompt", "--prompt-tokens", "N")] = None
    shared: Annotated[Number, Flag("tokens that all prompts begin with", "--shared-tokens", "N")] = None
    group: Annotated[Number, Flag("requests of one prompt", "--group-size", "N")] = None
    answer: Annotated[Number, Flag("mean length of an answer", "--answer-tokens", "N")] = None
    spread: Annotated[float, Flag("its standard deviation over its mean", "--answer-spread")] = 0.6
    in_flight: Annotated[Number, Flag("requests on one engine", "--in-flight", "N")] = None
    per_hour: Annotated[Number, Flag(None, "--publications-per-hour", "N")] = None
    chunk: Annotated[Number, Flag("tokens of a prefill step", "--chunk", "N")] = None
    one_by_one: Annotated[bool, Flag("a group's requests don't reach the engine at once", "--one-by-one")] = False
    prefill: Annotated[Number, Flag("tokens per second of one engine", "--prefill-speed")] = None
    decode: Annotated[Number, Flag("tokens per second with all requests in flight", "--decode-speed")] = None
    standstill: Annotated[Number, Flag("seconds a publication in place takes", "--standstill", "S")] = None
    model_billions: Annotated[Number, Flag("active parameters, for the speeds")] = None
    tflops: Annotated[float, Flag("of all GPUs of the engine, for --model-billions")] = 989.0
    gb_s: Annotated[float, Flag("likewise; both default to one H100", "--bandwidth-gb-s")] = 3350.0


@dataclass(frozen=True, slots=True)
class Plan:
    traffic: Traffic
    speeds: Speeds
    predictions: dict[Mode, Prediction]
    recommendation: Recommendation
    by_period: list[Crossover]
    by_group: list[Crossover]
    notes: list[str] = field(default_factory=list)  # the sources of the figures
    recorded: from_ledger.Recorded | None = None
    compared: list[Cell] = field(default_factory=list)  # predictions next to a bench's measurements

    def format_traffic(self) -> str:
        t = self.traffic
        return (
            f"prompts of {t.prompt:.0f} tokens ({t.shared:.0f} in common), {t.group:.3g} requests of each, answers of "
            f"{t.answer:.0f}, {t.in_flight:.3g} in flight, a publication every {t.period_s:.3g} s; prefill "
            f"{self.speeds.prefill:.0f} and decode {self.speeds.decode:.0f} tokens/s, one engine"
        )

    def lines(self) -> list[str]:
        """Return the lines below the table."""
        found = [f"recommended: {self.recommendation.why}"]
        found += [_format_crossover(c, "a publication every {:.3g} s") for c in self.by_period]
        found += [_format_crossover(c, "{:.3g} requests of each prompt") for c in self.by_group]
        if self.compared:
            close = sum(c.close for c in self.compared)
            found.append(f"{close} of {len(self.compared)} predictions are within {CLOSE:.0%} of what was measured")
        if self.recorded is not None:
            r = self.recorded
            mine = self.predictions[r.mode]
            found.append(
                f"the run itself ({r.mode}): {r.tokens_per_s:.0f} finished tokens per second, "
                f"{r.prefilled_per_token:.2f} prefilled for each, {r.mixed_share:.0%} mixed; predicted "
                f"{mine.tokens_per_s:.0f}, {mine.prefilled_per_token:.2f}, {mine.mixed_share:.0%}"
            )
        return found + self.notes

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON; infinite figures (nothing is finished) are null."""
        return {
            "traffic": asdict(self.traffic),
            "speeds": asdict(self.speeds),
            "predictions": [_finite(asdict(p)) for p in self.predictions.values()],
            "recommended": self.recommendation.mode,
            "why": self.recommendation.why,
            "crossovers": {
                "period_s": [asdict(c) for c in self.by_period],
                "group": [asdict(c) for c in self.by_group],
            },
            "recorded": None if self.recorded is None else from_ledger.to_json(self.recorded),
            "compared": [_finite({**asdict(c), "off_by": c.off_by}) for c in self.compared],
            "notes": self.notes,
        }


def make_plan(given: Given) -> Plan:
    """Make a plan. Raises PlanError for missing or impossible settings, MeasurementError for another file than the
    bench's."""
    if given.run_dir is not None and given.bench is not None:
        raise PlanError("give RUN_DIR or --bench, not both: each determines the traffic")
    base = _base(given)
    traffic = _traffic(given, base.traffic)
    speeds = _speeds(given, traffic, base)
    return Plan(
        traffic,
        speeds,
        predict_all(traffic, speeds),
        recommend(traffic, speeds),
        crossovers(PERIODS, by_period(traffic), speeds),
        crossovers(GROUPS, by_group(traffic), speeds),
        base.notes,
        base.recorded,
        base.compared,
    )


@dataclass(frozen=True, slots=True)
class _Base:
    """The base has what a run or a bench provides; without either it is empty."""

    traffic: Traffic | None = None
    speeds: Callable[[], Speeds] | None = None  # called where no flag gives them: a run may have none
    notes: list[str] = field(default_factory=list)
    recorded: from_ledger.Recorded | None = None
    compared: list[Cell] = field(default_factory=list)


def _base(given: Given) -> _Base:
    if given.run_dir is not None:
        recorded = from_ledger.read_recorded(given.run_dir, given.chunk or CHUNK)
        notes = [f"traffic of {given.run_dir}"]
        if given.chunk is None:  # no run records it, and after a flush it decides which requests find a cached prompt
            notes.append(f"prefill steps of {CHUNK} tokens assumed; give the engines' chunked_prefill_size by --chunk")
        return _Base(recorded.traffic, lambda: from_ledger.fit_speeds(recorded, PREFILL_TO_DECODE), notes, recorded)
    if given.bench is not None:
        runs = read_runs(given.bench)
        results = merge_runs(runs)
        return _Base(
            results.shape.traffic(results.intervals()[-1]),
            lambda: from_bench.speeds_of(results),
            [f"traffic and speeds of {given.bench}"],
            compared=compare(runs),
        )
    return _Base()


def _traffic(given: Given, base: Traffic | None) -> Traffic:
    if given.per_hour is not None and given.per_hour <= 0:
        raise PlanError(f"--publications-per-hour {given.per_hour:g}; give more than 0")
    period = None if given.per_hour is None else 3600 / given.per_hour
    answers = None if given.answer is None else answers_around(given.answer, given.spread)
    changes: dict[str, Any] = {
        "prompt": given.prompt,
        "shared": given.shared,
        "group": given.group,
        "answers": answers,
        "in_flight": given.in_flight,
        "period_s": period,
        "chunk": given.chunk,
        "together": False if given.one_by_one else None,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if base is not None:
        return replace(base, **changes)
    missing = [
        flag
        for flag, value in (
            ("--prompt-tokens", given.prompt),
            ("--answer-tokens", given.answer),
            ("--in-flight", given.in_flight),
            ("--publications-per-hour", given.per_hour),
        )
        if value is None
    ]
    if missing:
        raise PlanError(f"the traffic isn't known: give {', '.join(missing)}; or a RUN_DIR, or --bench FILE")
    return Traffic(**{"shared": 0.0, "group": 1.0, **changes})


def _speeds(given: Given, traffic: Traffic, base: _Base) -> Speeds:
    """Return the speeds from flags first, then a model's size, then the run or bench; assumptions go to the notes."""
    if given.prefill is not None and given.decode is not None:
        known = base.recorded.standstill_s if base.recorded else base.speeds().standstill_s if base.speeds else 0.0
        stop = known if given.standstill is None else given.standstill
        return Speeds(given.prefill, given.decode, stop)
    if given.prefill is not None or given.decode is not None:
        raise PlanError("give --prefill-speed and --decode-speed, or neither")
    if given.model_billions is not None:
        base.notes.append(
            f"speeds by arithmetic alone, {given.model_billions:g} billion parameters on {given.tflops:g} TFLOP/s and "
            f"{given.gb_s:g} GB/s: reading the KV and what a server adds are left out"
        )
        return of_model(given.model_billions, given.tflops, given.gb_s, traffic.in_flight, given.standstill)
    if base.speeds is None:
        raise PlanError(
            "the engine's speed isn't known: give --prefill-speed and --decode-speed, or --model-billions, or "
            "--bench FILE"
        )
    found = base.speeds()
    if given.run_dir is not None:
        base.notes.append(
            f"speeds from its throughput, a prefilled token assumed to cost 1/{PREFILL_TO_DECODE:g} of a decoded one; "
            "--prefill-speed and --decode-speed take precedence"
        )
    return found if given.standstill is None else replace(found, standstill_s=given.standstill)


def _format_crossover(crossover: Crossover, axis: str) -> str:
    return f"from {axis.format(crossover.at)} on {crossover.above} instead of {crossover.below}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
