"""Advantages, loss and step against numbers worked out by hand. No engine: behaviour log-probs are made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_backend.local_trainer.grpo import (
    GrpoConfig,
    Sample,
    group_advantages,
    grpo_step,
    make_optimizer,
    policy_loss,
    token_logprobs,
)
from slime_backend.simulation import models


@pytest.fixture
def groups(token_ids: Callable[[int], list[int]]) -> list[list[Sample]]:
    shared = token_ids(40)
    rewards = ((0.0, 1.0, 0.5), (0.25, 0.25, 1.0))
    made = []
    for number, of_group in enumerate(rewards):
        prompt = [*shared, *token_ids(6)]
        made.append([Sample(prompt, token_ids(5 + i), [-5.5] * (5 + i), r, number) for i, r in enumerate(of_group)])
    return made


def weights_of(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def run_step(model: Any, groups: list[list[Sample]], **settings: Any) -> Any:
    config = GrpoConfig(**settings)
    return grpo_step(model, make_optimizer(model, config), groups, config)


def test_advantages_by_hand() -> None:
    std = math.sqrt((0.25 + 0.25 + 0.0) / 3)
    expected = [-0.5 / (std + 1e-6), 0.5 / (std + 1e-6), 0.0]
    assert group_advantages([0.0, 1.0, 0.5]) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[], [0.3], [0.3, 0.3, 0.3], [0.1 + 0.2, 0.3]])
def test_equal_rewards_give_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_loss_truncation_and_gradient_by_hand() -> None:
    now = torch.tensor([-1.0, -2.0, -3.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0, -1.0, -5.0, -9.0])
    advantages = torch.tensor([1.0, 2.0, -1.0, 1.0])
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0])  # the last token is masked out

    fresh = torch.zeros(4, dtype=torch.bool)
    loss, importance = policy_loss(now, engine, advantages, weights, fresh, GrpoConfig(ratio_bound=2.0))
    loss.backward()

    below = math.exp(-1.0)
    assert importance.tolist() == pytest.approx([1.0, below, 2.0, 2.0])
    # exp(2) is cut to 2; the ratio is a constant, so the gradient is the plain policy gradient times it
    assert float(loss.detach()) == pytest.approx(-(0.5 * -1.0 + 0.25 * below * 2 * -2.0 + 0.25 * 2.0 * -1 * -3.0))
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-0.5, -0.25 * below * 2, 0.25 * 2.0, 0.0])


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_step_reports_the_loss_of_the_definition(tiny: Any, groups: list[list[Sample]], normalise: Any) -> None:
    masked = replace(groups[0][1], loss_mask=[0, 1, 0, 1, 1, 1])
    groups[0][1] = masked
    logprobs = [lp.detach() for lp in token_logprobs(tiny, [s for g in groups for s in g])]
    advantages = [a for g in groups for a in group_advantages([s.reward for s in g])]
    terms, means, tokens = 0.0, 0.0, 0
    samples = [s for g in groups for s in g]
    for sample, lp, advantage in zip(samples, logprobs, advantages, strict=True):
        mask = torch.tensor(sample.loss_mask or [1] * len(lp), dtype=torch.float32)
        values = -(lp + 5.5).exp().clamp(max=1.05) * advantage * lp * mask
        terms += float(values.sum())
        means += float(values.sum() / mask.sum())
        tokens += int(mask.sum())

    metrics = run_step(tiny, groups, normalise=normalise, ratio_bound=1.05, micro_batch=4)

    expected = terms / tokens if normalise == "token" else means / len(samples)
    assert metrics.loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics.tokens == tokens == 5 + 4 + 7 + 5 + 6 + 7
    assert metrics.reward_mean == pytest.approx(0.5)
    assert 0 < metrics.clipped_share < 1
    assert metrics.ratio_max > 1.05
    assert metrics.shared_prefix == 40
    assert metrics.groups_without_signal == 0


def test_behaviour_equal_to_trainer_is_on_policy(tiny: Any, groups: list[list[Sample]]) -> None:
    exact = [
        [replace(s, behaviour_logprobs=lp.tolist()) for s, lp in zip(g, token_logprobs(tiny, g), strict=True)]
        for g in groups
    ]
    metrics = run_step(tiny, exact)
    assert metrics.logprob_gap_mean < 1e-5
    assert metrics.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert metrics.clipped_share == 0.0


def test_a_masked_token_does_not_matter(tiny_directory: Path, groups: list[list[Sample]]) -> None:
    results = []
    for engine_says in (-5.5, -0.5):
        model = models.load_model(tiny_directory)
        sample = groups[0][0]
        changed = [engine_says, *sample.behaviour_logprobs[1:]]
        groups[0][0] = replace(sample, behaviour_logprobs=changed, loss_mask=[0, 1, 1, 1, 1])
        run_step(model, groups)
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_micro_batches_do_not_change_the_gradient(tiny_directory: Path, groups: list[list[Sample]]) -> None:
    found = [run_step(models.load_model(tiny_directory), groups, micro_batch=size) for size in (1, 4, 64)]
    for metrics in found[1:]:
        assert metrics.loss == pytest.approx(found[0].loss, rel=1e-4, abs=1e-6)
        assert metrics.grad_norm == pytest.approx(found[0].grad_norm, rel=1e-4)


def test_steps_are_deterministic(tiny_directory: Path, groups: list[list[Sample]]) -> None:
    pair = [models.load_model(tiny_directory) for _ in range(2)]
    first, second = (run_step(model, groups) for model in pair)
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(weights_of(pair[0]), weights_of(pair[1]), strict=True))


def test_a_step_raises_the_odds_of_the_better_answer(tiny: Any, groups: list[list[Sample]]) -> None:
    worse, better = groups[0][0], groups[0][1]
    before = [float(lp.detach().sum()) for lp in token_logprobs(tiny, [worse, better])]
    run_step(tiny, groups[:1], learning_rate=1e-3)
    after = [float(lp.detach().sum()) for lp in token_logprobs(tiny, [worse, better])]
    assert after[1] > before[1]
    assert after[1] - before[1] > after[0] - before[0]


def test_a_batch_without_signal_leaves_the_weights(tiny: Any, groups: list[list[Sample]]) -> None:
    config = GrpoConfig()
    optimizer = make_optimizer(tiny, config)
    grpo_step(tiny, optimizer, groups, config)  # gives Adam a momentum that must not act below
    before = weights_of(tiny)
    same = [[replace(s, reward=0.5) for s in g] for g in groups]
    metrics = grpo_step(tiny, optimizer, same, config)
    assert metrics.groups_without_signal == 2
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(tiny), strict=True))


def test_a_gradient_that_is_not_finite_is_refused(tiny: Any, groups: list[list[Sample]]) -> None:
    with torch.no_grad():
        tiny.lm_head.weight[0, 0] = float("nan")
    before = weights_of(tiny)
    with pytest.raises(FloatingPointError, match="left as they were"):
        run_step(tiny, groups)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, weights_of(tiny), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behaviour_logprobs": [-1.0]}, "1 log-probs for 2 output tokens"),
        ({"loss_mask": [1]}, "loss mask of 1 for 2"),
        ({"stale": [1]}, "1 marks of staleness for 2"),
        ({"reward": math.nan}, "finite"),
        ({"behaviour_logprobs": [-1.0, -math.inf]}, "finite"),
        ({"output_ids": [], "behaviour_logprobs": []}, "at least one output token"),
    ],
)
def test_a_broken_sample_is_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"prompt_ids": [1], "output_ids": [2, 3], "behaviour_logprobs": [-1.0, -2.0], "reward": 1.0}
    Sample(**good)
    with pytest.raises(ValueError, match=message):
        Sample(**{**good, **changes})


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 0}, {"ratio_bound": 0.5}, {"ratio_low": 1.5}, {"ratio_high": 0.9}, {"normalise": "none"}],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each message names its own setting
        GrpoConfig(**settings)


def test_an_empty_step_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        run_step(tiny, [])
