"""The planner against measurements on real engines: docs/benchmarks/modes.json, from `reef-slime bench modes`.

The engine's speeds and one mode's standstill are taken from the file; throughput, prefilled tokens and lag of every
mode are predicted. A prediction that is off by more than a fifth is named here, and counted in
docs/benchmarks/planner.md; one that is not named fails, and so does a name that is no longer true.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from slime_backend.bench.modes import PARTS
from slime_backend.planner import measured
from slime_backend.planner.compare import CLOSE, FIGURES, Cell, compare
from slime_backend.planner.from_bench import speeds_of
from slime_backend.planner.predict import predict
from slime_backend.planner.work import MODES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "benchmarks" / "modes.json"
OFF: set[tuple[str, float, str]] = {("retract", 6.0, "lag")}


@pytest.fixture(scope="module")
def runs() -> list[measured.ModeResults]:
    return measured.read_runs(FILE)


@pytest.fixture(scope="module")
def cells(runs: list[measured.ModeResults]) -> list[Cell]:
    return compare(runs)


def test_every_mode_and_interval_is_compared(runs, cells):
    intervals = [interval for run in runs for interval in run.intervals()]
    assert len(intervals) >= 2
    assert set(intervals) <= set(PARTS.values())
    assert len(cells) == len(MODES) * len(intervals) * len(FIGURES)


def test_predictions_are_within_a_fifth_but_for_those_that_are_named(cells):
    assert {(c.mode, c.interval_s, c.figure) for c in cells if not c.close} == OFF


def test_what_is_named_is_in_the_documentation(cells):
    text = (ROOT / "docs" / "benchmarks" / "planner.md").read_text()
    close = sum(c.close for c in cells)
    assert f"{close} of {len(cells)} predictions are within {CLOSE:.0%}" in text


def test_the_formulas_of_another_mode_would_not_do(runs, cells):
    """The control: each mode's measurements against every other mode's prediction."""
    taken: Counter[bool] = Counter()
    for run in runs:
        for cell in compare([run]):
            for other in MODES:
                prediction = predict(other, run.shape.traffic(cell.interval_s), speeds_of(run))
                taken[other == cell.mode] += replace(cell, predicted=getattr(prediction, cell.figure)).close
    assert taken[True] / len(cells) > 2 * taken[False] / (len(cells) * (len(MODES) - 1))
