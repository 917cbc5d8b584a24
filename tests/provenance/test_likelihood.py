"""Rollouts in 16 bits: which claim explains them, how often that is wrong, and what can't be decided.

The noise is heavier than normal, as it is on engines: Student's t of 3 degrees of freedom, a scale for each rollout.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_backend.audit.likelihood import Alternative, Observed, judge, noise_of, ratio, slope

NOISE = 0.02


def rollout(
    rng: np.random.Generator,
    number: int = 0,
    tokens: int = 64,
    step: float = 0.1,
    truth: int | None = None,
    claims: int = 4,
    engine: str = "engine0",
) -> Observed:
    """`truth`: which alternative is the true one; None: the claim holds. `step`: sd of a token's difference."""
    noise = NOISE * rng.uniform(0.7, 1.4) * rng.standard_t(3, tokens)
    directions = [step * rng.standard_normal(tokens) for _ in range(claims)]
    residual = noise + (directions[truth] if truth is not None else 0.0)
    names = ["wrong label", "stale prefix", "carried, not recomputed", "recomputed, not carried"]
    alternatives = [Alternative((names[i % 4], i), names[i % 4], f"claim {i}", d) for i, d in enumerate(directions)]
    return Observed(f"r{number}", engine, residual, tuple(alternatives))


def run(seed: int, count: int = 40, **options: object) -> list[Observed]:
    rng = np.random.default_rng(seed)
    return [rollout(rng, number, **options) for number in range(count)]  # type: ignore[arg-type]


def test_an_honest_run_is_decided_for_its_claims() -> None:
    found = judge(run(1))
    assert (found.findings, found.undecided) == ([], {})
    assert len(found.decided) == 40
    for line in found.slopes:
        assert abs(line["slope"]) < 5 * line["error"]


def test_a_thousand_honest_runs_raise_at_most_one_alarm() -> None:
    """Where a rollout has power, and where it has none: steps from far below the noise to far above."""
    alarms = 0
    for seed in range(1000):
        alarms += bool(judge(run(seed, count=10, tokens=24, step=(0.002, 0.02, 0.2)[seed % 3])).findings)
    assert alarms <= 1


@pytest.mark.parametrize("truth", range(4))
@pytest.mark.parametrize("share", [1, 20, 40])  # of 40: one, half of them, all
def test_each_fault_is_named_and_nobody_else(truth: int, share: int) -> None:
    rng = np.random.default_rng(truth)
    observed = [rollout(rng, n, truth=truth if n < share else None) for n in range(40)]
    found = judge(observed)
    assert {f.observed.receipt for f in found.findings} == {f"r{n}" for n in range(share)}
    assert {f.alternative.text for f in found.findings if f.alternative} == {f"claim {truth}"}
    assert all(f.slope == pytest.approx(1.0, abs=6 * f.error) for f in found.findings)
    # The noise is that of the true claims, also where no recorded one holds.
    assert NOISE / 2 < found.noise < 2 * NOISE


def test_a_step_below_the_noise_shows_in_many_rollouts_of_one_engine_together() -> None:
    """No rollout alone has the power; an engine of a wrong label has it in all of them, the other engine hasn't."""
    rng = np.random.default_rng(5)
    mine = [rollout(rng, n, tokens=16, step=0.01, truth=0, engine="engine1") for n in range(60)]
    others = [rollout(rng, 100 + n, tokens=16, step=0.01) for n in range(60)]
    found = judge([*mine, *others])
    assert found.findings
    assert {f.observed.engine for f in found.findings} == {"engine1"}
    assert 60 in {f.together for f in found.findings}
    assert not judge(mine[:3]).findings  # the control: three rollouts don't suffice


def test_what_the_noise_hides_is_undecided_and_not_clean() -> None:
    found = judge(run(3, step=0.001))
    assert not found.findings
    assert not found.decided
    assert all(tokens > 0 for _, tokens in found.undecided.values())


def test_what_no_claim_explains_is_named() -> None:
    observed = run(4)
    rng = np.random.default_rng(0)
    odd = observed[7]
    observed[7] = Observed(odd.receipt, odd.engine, odd.residual + rng.standard_normal(64), odd.alternatives)
    (finding,) = judge(observed).findings
    assert (finding.observed.receipt, finding.alternative) == ("r7", None)


def test_without_another_claim_there_is_nothing_to_decide() -> None:
    alone = Observed("r", "e", np.full(8, 0.01), ())
    assert judge([alone]).decided == {"r"}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.1, 0.5]))
def test_the_ratio_is_one_against_the_other(seed: int, step: float) -> None:
    """Claim and alternative exchanged: the same ratio with the other sign."""
    one = rollout(np.random.default_rng(seed), step=step, truth=0, claims=1)
    direction = one.alternatives[0].direction
    forth = ratio(one.residual, direction, NOISE)
    back = ratio(one.residual - direction, -direction, NOISE)
    assert forth == pytest.approx(-back)


def test_slopes_and_noise_of_nothing() -> None:
    assert math.isnan(slope([np.zeros(3)], [np.zeros(3)])[0])
    assert noise_of([]) > 0
