"""The planner reads these measurements of `bench modes`: the traffic, the engines' speeds and the slices.

`bench modes` fills these classes and writes them into its page's file, run by run; `read_runs` reads that file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slime_backend.errors import ReefError, UsageError
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import Mode


class MeasurementError(ReefError, RuntimeError):
    """A file of measurements can't be used, or lacks a mode; the message is one line."""


class MeasurementsMissing(UsageError, MeasurementError):
    """The named file of measurements can't be read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape is the traffic of a bench, in tokens unless noted."""

    prompt: int
    group: int  # requests with the same prompt
    answers: tuple[int, ...]  # lengths, equally likely
    in_flight: int  # requests, on one engine
    chunk: int  # tokens of one prefill step

    @property
    def longest(self) -> int:
        return self.prompt + max(self.answers)

    def traffic(self, interval_s: float) -> Traffic:
        """Return this as the planner's Traffic, with `interval_s` seconds between two publications."""
        return Traffic(
            prompt=self.prompt,
            shared=0,
            group=self.group,
            answers=tuple(float(a) for a in self.answers),
            in_flight=self.in_flight,
            period_s=interval_s,
            chunk=self.chunk,
            together=False,
        )


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # sum over all requests in flight
    admission_ms: float  # that a request costs in addition to its tokens; noise may make it negative


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice has one slice's figures, counted in its window."""

    mode: Mode
    interval_s: float
    seed: int  # slices with the same one had the same requests
    seconds: float
    publications: int
    finished: int  # requests
    tokens: int  # sampled, and in an answer that is finished or goes on
    thrown_away: int  # tokens: sampled, in no such answer
    prefilled: int  # tokens
    lag_mean: float  # publications between a finished token's sampling and its answer's end
    mixed_share: float  # share of the finished requests
    paused_ms: float  # median

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def prefilled_per_token(self) -> float:
        return self.prefilled / max(1, self.tokens)


@dataclass(slots=True)
class ModeResults:
    shape: Shape
    model: Mapping[str, Any]
    speeds: list[EngineSpeeds] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)

    def intervals(self) -> list[float]:
        return sorted({s.interval_s for s in self.slices})

    def of(self, mode: Mode, interval_s: float) -> list[Slice]:
        return [s for s in self.slices if s.mode == mode and s.interval_s == interval_s]

    def median(self, mode: Mode, interval_s: float, what: str) -> float:
        """Return the median of a field or property of the slices. Raises MeasurementError where there are none."""
        found = [getattr(s, what) for s in self.of(mode, interval_s)]
        if not found:
            raise MeasurementError(f"no slice of {mode} with a publication every {interval_s:g} s was measured")
        return statistics.median(found)

    def typical_speeds(self) -> EngineSpeeds:
        """Return the median speeds over both engines, which differ less than the machine does from minute to minute."""
        names = [f.name for f in fields(EngineSpeeds)]
        medians = {name: statistics.median(getattr(s, name) for s in self.speeds) for name in names}
        return EngineSpeeds(**{**medians, "admission_ms": max(0.0, medians["admission_ms"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> ModeResults:
    shape = {**data["shape"], "answers": tuple(data["shape"]["answers"])}
    speeds, slices = [EngineSpeeds(**s) for s in data["speeds"]], [Slice(**s) for s in data["slices"]]
    return ModeResults(Shape(**shape), data["model"], speeds, slices)


def read_runs(path: Path) -> list[ModeResults]:
    """Read a file run by run. Raises MeasurementError where it isn't from `bench modes`, or its runs differ."""
    try:
        runs = [from_json(run["details"]) for run in json.loads(path.read_text())["runs"]]
    except OSError as error:
        raise MeasurementsMissing(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise MeasurementError(
            f"{path}: not what `reef-slime bench modes --write` writes ({type(error).__name__}: {error})"
        ) from error
    if not runs or not all(run.slices and run.speeds for run in runs):
        raise MeasurementError(f"{path}: nothing was measured in it")
    if any((run.shape, run.model) != (runs[0].shape, runs[0].model) for run in runs):
        raise MeasurementError(f"{path}: its parts were measured with different traffic or models; measure them again")
    return runs


def merge_runs(runs: Sequence[ModeResults]) -> ModeResults:
    """Return one result with the speeds and slices of all runs."""
    speeds, slices = [s for run in runs for s in run.speeds], [s for run in runs for s in run.slices]
    return ModeResults(runs[0].shape, runs[0].model, speeds, slices)


def read(path: Path) -> ModeResults:
    """Read a file as one result. Raises MeasurementError as `read_runs`."""
    return merge_runs(read_runs(path))
