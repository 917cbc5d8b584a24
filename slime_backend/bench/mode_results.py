"""What `bench modes` measured, slice by slice, as it stands in the runs of its page's file, for the planner."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slime_backend.bench.engine_speeds import EngineSpeeds
from slime_backend.bench.mode_load import Shape
from slime_backend.bench.mode_slices import Slice
from slime_backend.bench.rows import BenchError
from slime_backend.planner.work import Mode


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
        """Of a field or property of the slices. Raises BenchError where there is none."""
        found = [getattr(s, what) for s in self.of(mode, interval_s)]
        if not found:
            raise BenchError(f"no slice of {mode} with a publication every {interval_s:g} s was measured")
        return statistics.median(found)

    def typical_speeds(self) -> EngineSpeeds:
        """Each the median, over both engines: alone they differ less than the machine does from minute to minute."""
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
    """Run by run. Raises BenchError where it isn't a file of `bench modes`, or its runs differ."""
    try:
        runs = [from_json(run["details"]) for run in json.loads(path.read_text())["runs"]]
    except OSError as error:
        raise BenchError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{path}: not what `reef-slime bench modes --write` writes ({type(error).__name__}: {error})"
        ) from error
    if not runs or not all(run.slices and run.speeds for run in runs):
        raise BenchError(f"{path}: nothing was measured in it")
    if any((run.shape, run.model) != (runs[0].shape, runs[0].model) for run in runs):
        raise BenchError(f"{path}: its parts were measured with different traffic or models; measure them anew")
    return runs


def together(runs: Sequence[ModeResults]) -> ModeResults:
    """All runs of a file."""
    speeds, slices = [s for run in runs for s in run.speeds], [s for run in runs for s in run.slices]
    return ModeResults(runs[0].shape, runs[0].model, speeds, slices)


def read(path: Path) -> ModeResults:
    """Raises BenchError as `read_runs`."""
    return together(read_runs(path))
