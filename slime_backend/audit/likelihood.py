"""Which claim explains a rollout's log-probs, where an engine computes in 16 bits and no bound tells fault from noise.

In bfloat16 an honest engine differs from a float32 reference by 1e-3 (a tiny model) to 5e-2 (SmolLM2-135M) per token,
which is more than a step of the optimizer does. But the direction in which a fault differs is known: every alternative
claim can be recomputed as exactly as the recorded one (diagnosis.py). With

    r_t   log-prob of the engine - of the reference under the recorded claim
    d_t   of the reference under the alternative - of the reference under the recorded claim

the residual is noise under the claim, r = e, and r = d + e under the alternative. Both are scored with a Student t of
4 degrees of freedom, whose scale is the noise that this run shows, so that single large residuals count little; the
log-likelihood ratio is the sum over tokens (A. Wald, Sequential Analysis, 1947). A rollout is contaminated above
log(comparisons / ALPHA), and decided in favour of its claim below -log(1 / BETA); between these its tokens don't
suffice. Ratios of one alternative are added up over an engine's rollouts as well: a wrong label concerns all of them.

Pure: numpy, no torch, no I/O.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALPHA = 1e-3  # the chance of a false alarm in a run, over all of its comparisons
BETA = 1e-3  # the chance to take one contaminated rollout for what it claims
FREEDOM = 4.0
MAD = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation
OUTLIER = 6.0  # times the noise of the run: a rollout whose own noise is that large is of no version that was tried
ROUNDS = 3
LEAST = 1e-12  # nats

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another claim for a rollout. `key`: what it has in common with those of other rollouts (fault, versions)."""

    key: Hashable
    fault: str
    text: str
    direction: Array  # (tokens,) nats


@dataclass(frozen=True, slots=True)
class Observed:
    """One rollout: its residual under the recorded claim, and its alternatives. (tokens,) nats each."""

    receipt: str
    engine: str
    residual: Array
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rollout that another claim explains, or none does (`alternative` None)."""

    observed: Observed
    alternative: Alternative | None
    ratio: float  # log-likelihood, alternative over claim
    slope: float
    error: float
    together: int = 1  # rollouts of this engine that were decided together

    def __str__(self) -> str:
        tokens = len(self.observed.residual)
        if self.alternative is None:
            return (
                f"its {tokens} tokens differ by {self.ratio:.0f} times the run's noise, and no other claim explains it"
            )
        group = f" with {self.together} rollouts of {self.observed.engine}" if self.together > 1 else ""
        return (
            f"{self.alternative.text}: slope {self.slope:.2f} +- {self.error:.2f} over {tokens} tokens{group}, "
            f"log-likelihood ratio {self.ratio:.0f}"
        )


@dataclass(slots=True)
class Judgement:
    noise: float  # standard deviation of a token's log-prob, nats
    findings: list[Finding] = field(default_factory=list)
    decided: set[str] = field(default_factory=set)  # receipts whose claim holds against every alternative
    undecided: dict[str, tuple[str, int]] = field(default_factory=dict)  # receipt -> (alternative, tokens that lack)
    slopes: list[dict[str, Any]] = field(default_factory=list)  # by fault, over all rollouts


def slope(residuals: Iterable[Array], directions: Iterable[Array]) -> tuple[float, float]:
    """(slope, its standard error, robust against unequal noise) of the residual along a direction: 0 where the claim
    holds, 1 where the alternative is the truth; NaN without a direction."""
    r, d = np.concatenate(list(residuals)), np.concatenate(list(directions))
    square = float(d @ d)
    if square <= LEAST:
        return math.nan, math.inf
    beta = float(d @ r) / square
    return beta, float(np.sqrt(((d * (r - beta * d)) ** 2).sum()) / square)


def ratio(residual: Array, direction: Array, noise: float) -> float:
    """log-likelihood of the alternative over that of the claim."""
    return float((_loss(residual / noise) - _loss((residual - direction) / noise)).sum())


def _loss(x: Array) -> Array:
    return (FREEDOM + 1) / 2 * np.log1p(x * x / FREEDOM)


def noise_of(observed: Sequence[Observed]) -> float:
    """The noise of a token, of the claim that explains each rollout best: most of a run may be contaminated."""
    noise = _scale([o.residual for o in observed])
    for _ in range(ROUNDS):
        noise = _scale([_best_residual(o, noise) for o in observed])
    return noise


def _best_residual(observed: Observed, noise: float) -> Array:
    found = max(
        ((ratio(observed.residual, a.direction, noise), a) for a in observed.alternatives), key=_first, default=None
    )
    return observed.residual - found[1].direction if found is not None and found[0] > 0 else observed.residual


def _first(pair: tuple[float, Alternative]) -> float:
    return pair[0]


def _scale(residuals: Sequence[Array]) -> float:
    values = np.abs(np.concatenate(residuals)) if residuals else np.zeros(1)
    return max(float(MAD * np.median(values)), LEAST)


def judge(observed: Sequence[Observed], alpha: float = ALPHA, beta: float = BETA) -> Judgement:
    """The verdict on each rollout, and on each alternative over the rollouts of an engine."""
    noise = noise_of(observed)
    found = Judgement(noise)
    comparisons = max(1, sum(len(o.alternatives) for o in observed))
    alarm, hold = math.log(comparisons / alpha), math.log(1 / beta)
    together: dict[Hashable, list[tuple[Observed, Alternative, float]]] = defaultdict(list)
    by_fault: dict[str, list[tuple[Array, Array]]] = defaultdict(list)
    blamed: set[str] = set()
    for one in observed:
        ratios = [(ratio(one.residual, a.direction, noise), a) for a in one.alternatives]
        for value, alternative in ratios:
            together[one.engine, alternative.key].append((one, alternative, value))
            by_fault[alternative.fault].append((one.residual, alternative.direction))
        best = max(ratios, key=_first, default=None)
        if best is not None and best[0] > alarm:
            found.findings.append(_finding(one, best[1], best[0]))
            blamed.add(one.receipt)
        elif (own := _scale([one.residual])) > OUTLIER * noise:
            found.findings.append(Finding(one, None, own / noise, math.nan, math.inf))
            blamed.add(one.receipt)
        elif best is None or best[0] < -hold:
            found.decided.add(one.receipt)
        else:
            found.undecided[one.receipt] = (best[1].text, _tokens_lacking(best[0], hold, len(one.residual)))
    found.findings += _groups(together, blamed, alarm)
    for fault, pairs in sorted(by_fault.items()):
        value, error = slope(*zip(*pairs, strict=True))
        tokens = sum(len(r) for r, _ in pairs)
        found.slopes.append({"fault": fault, "slope": value, "error": error, "tokens": tokens, "rollouts": len(pairs)})
    return found


def _finding(one: Observed, alternative: Alternative, value: float, together: int = 1) -> Finding:
    return Finding(one, alternative, value, *slope([one.residual], [alternative.direction]), together)


def _groups(
    together: dict[Hashable, list[tuple[Observed, Alternative, float]]], blamed: set[str], alarm: float
) -> list[Finding]:
    """What only the rollouts of one engine together show: each is named."""
    found = []
    for members in together.values():
        total = sum(value for _, _, value in members)
        if total <= alarm:
            continue
        for one, alternative, value in members:
            if value > 0 and one.receipt not in blamed:
                blamed.add(one.receipt)
                found.append(_finding(one, alternative, total, len(members)))
    return found


def _tokens_lacking(value: float, hold: float, tokens: int) -> int:
    """How many more tokens like these would decide for the claim; a guess, where they speak against it so far."""
    per_token = max(-value, 1.0) / max(tokens, 1)
    return math.ceil((hold + min(value, 0.0)) / per_token)
