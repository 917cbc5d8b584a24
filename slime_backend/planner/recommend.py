"""`recommend` chooses the best mode; `crossovers` finds where along an axis another one becomes better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slime_backend.planner.predict import Prediction, predict, predict_all
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import PlanError, Traffic
from slime_backend.planner.work import POLICIES, Mode

# Predictions this close count as equal, and the first of PREFERRED is taken: after a retract each token's log-prob is
# from one version, and `off` needs the least of an engine.
ALIKE = 0.03
Ours = Literal["retract", "off", "scoped"]
PREFERRED: tuple[Ours, ...] = ("retract", "off", "scoped")

PERIODS = tuple(10 ** (i / 20) for i in range(-6, 75))  # seconds: half a second to an hour and a half
GROUPS = tuple(range(1, 65))
BISECTIONS = 30

At = Callable[[float], Traffic]


@dataclass(frozen=True, slots=True)
class Recommendation:
    mode: Mode
    why: str  # one line


@dataclass(frozen=True, slots=True)
class Crossover:
    """At a crossover the recommendation changes: from `at` on, `above` instead of `below`."""

    at: float
    below: Mode
    above: Mode


def best(predictions: dict[Mode, Prediction]) -> Mode | None:
    """Return the best of our policies, or None where no mode finishes anything.

    slime's abort is predicted for comparison only.
    """
    fastest = max(predictions[mode].tokens_per_s for mode in POLICIES)
    if not fastest:
        return None
    return next(m for m in PREFERRED if predictions[m].tokens_per_s >= (1 - ALIKE) * fastest)


def recommend(traffic: Traffic, speeds: Speeds) -> Recommendation:
    """Recommend a mode. Raises PlanError where no mode finishes anything."""
    predictions = predict_all(traffic, speeds)
    mode = best(predictions)
    if mode is None:
        raise PlanError(
            f"with a publication every {traffic.period_s:.3g} s, in which the engine is paused for "
            f"{speeds.standstill_s:.3g} s, no mode finishes anything; publish less often"
        )
    mine = predictions[mode]
    others = [predictions[m] for m in POLICIES if m != mode]
    rest = ", ".join(f"{o.mode} {o.tokens_per_s:.0f} ({o.prefilled_per_token:.2f})" for o in others)
    alike = [o.mode for o in others if o.tokens_per_s >= (1 - ALIKE) * mine.tokens_per_s]
    reason = (
        f"within {ALIKE:.0%} of {' and '.join(alike)}, and it is preferred among equals" if alike else "the fastest"
    )
    return Recommendation(
        mode,
        f"{mode}: {mine.tokens_per_s:.0f} finished tokens per second and {mine.prefilled_per_token:.2f} prefilled for "
        f"each (others: {rest}): {reason}",
    )


def crossovers(points: Sequence[float], at: At, speeds: Speeds) -> list[Crossover]:
    """Find where the recommended mode changes between two of `points`, by bisection."""

    def mode_at(x: float) -> Mode | None:
        traffic = at(x)
        return best({m: predict(m, traffic, speeds) for m in POLICIES})

    found: list[Crossover] = []
    modes = [mode_at(x) for x in points]
    for i in range(len(points) - 1):
        below, above = modes[i], modes[i + 1]
        if below is None or above is None or below == above:
            continue
        low, high = points[i], points[i + 1]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if mode_at(middle) == below else (low, middle)
        found.append(Crossover(high, below, above))
    return found


def by_period(traffic: Traffic) -> At:
    return lambda seconds: replace(traffic, period_s=seconds)


def by_group(traffic: Traffic) -> At:
    return lambda group: replace(traffic, group=max(1, math.floor(group)))
