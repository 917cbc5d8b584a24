"""`compare` compares predictions with `reef-slime bench modes`: one cell per mode, interval and figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_backend.planner.from_bench import speeds_of
from slime_backend.planner.measured import ModeResults
from slime_backend.planner.predict import predict
from slime_backend.planner.work import MODES, Mode

CLOSE = 0.2  # relative error up to which a prediction is close
FIGURES = ("tokens_per_s", "prefilled_per_token", "lag")
MEASURED = {"lag": "lag_mean"}  # the names in a slice, where they differ


@dataclass(frozen=True, slots=True)
class Cell:
    mode: Mode
    interval_s: float
    figure: str
    measured: float  # median over the slices
    predicted: float

    @property
    def off_by(self) -> float:
        """Return the error relative to the measured value; infinite where that is 0 and the prediction isn't."""
        if self.measured == self.predicted:
            return 0.0
        return abs(self.predicted - self.measured) / self.measured if self.measured else float("inf")

    @property
    def close(self) -> bool:
        return self.off_by <= CLOSE


def compare(runs: Sequence[ModeResults]) -> list[Cell]:
    """Compare each mode with its prediction.

    A prediction is calibrated by the engines alone and one mode's pause in the same run (from_bench.py); nothing else
    of the slices goes in. Raises MeasurementError where a mode wasn't measured.
    """
    return [cell for results in runs for cell in _cells(results)]


def _cells(results: ModeResults) -> list[Cell]:
    cells = []
    for interval_s in results.intervals():
        traffic = results.shape.traffic(interval_s)
        for mode in MODES:
            prediction = predict(mode, traffic, speeds_of(results))
            for figure in FIGURES:
                measured = results.median(mode, interval_s, MEASURED.get(figure, figure))
                cells.append(Cell(mode, interval_s, figure, measured, getattr(prediction, figure)))
    return cells
