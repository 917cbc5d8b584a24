"""Staleness from records to the step's loss and gradient, against sums written out in plain Python.

The model is a unigram: its log-probs are those of one row of weights whatever came before, so that everything can be
worked out by hand. What a real engine reports as spans is tested in tests/engine_plugin.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_backend.local_trainer.batch import Batch, collect_batch
from slime_backend.local_trainer.grpo import GrpoConfig, grpo_step
from slime_backend.provenance.errors import StalenessError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.tracking.columns import StepMetrics
from slime_backend.wire import Span

TRAINER = 3  # the trainer stands at v3
CONFIG = GrpoConfig(max_grad_norm=1e9)
WEIGHTS = (0.3, -0.2, 0.8, 0.0, -1.1)


class Unigram(torch.nn.Module):
    """The parts of a causal LM that the trainer touches; the same logits at every position."""

    def __init__(self, weights: tuple[float, ...]) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, len(weights), bias=False)
        self.head.weight.data = torch.tensor(weights)[:, None].clone()

    def base_model(self, *, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.ones(*input_ids.shape, 1))

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


def now(token: int) -> float:
    return WEIGHTS[token] - math.log(math.fsum(math.exp(w) for w in WEIGHTS))


def rollout(name: str, reward: float, tokens: list[tuple[int, int, float]]) -> RolloutRecord:
    """`tokens`: (id, lag, ratio of the trainer's probability to the sampling version's)."""
    spans: list[Span] = []
    for i, (_, lag, _) in enumerate(tokens):
        spans.append(Span(f"v{TRAINER - lag}", i, i + 1))
    return RolloutRecord(
        receipt=name,
        group=name[0],
        engine="engine0",
        question="q",
        prompt_ids=(ord(name[-1]) % 5, 1),  # no common prefix
        output_ids=tuple(t for t, _, _ in tokens),
        logprobs=tuple(now(t) - math.log(ratio) for t, _, ratio in tokens),
        temperature=1.0,
        reward=reward,
        finish_reason="length",
        spans=tuple(spans),
        segments=(),
        prefills=(),
        submitted_at=0.0,
        finished_at=1.0,
    )


# Ratios: inside the bound 2, truncated (2..5), over 5, under 0.5. Lags over the bound of 1 are stale.
A = [
    rollout("a1", 1.0, [(0, 0, 1.0), (1, 0, 0.3), (2, 1, 3.0), (3, 1, 7.0)]),
    rollout("a2", 0.0, [(4, 2, 0.4), (2, 2, 0.6), (2, 2, 1.5), (0, 0, 1.1)]),
    rollout("a3", 0.25, [(1, 3, 4.0), (3, 3, 6.0), (0, 1, 0.9)]),
]
B = [
    rollout("b1", 0.5, [(2, 0, 1.2), (3, 0, 0.8)]),
    rollout("b2", 0.0, [(0, 2, 1.0), (1, 2, 2.5)]),
]
C = [
    rollout("c1", 0.2, [(1, 0, 1.3)]),
    rollout("c2", 0.9, [(2, 0, 0.7), (4, 1, 1.0)]),
]
D = [
    rollout("d1", 0.6, [(3, 1, 2.2), (3, 0, 1.0)]),
    rollout("d2", 0.1, [(0, 0, 0.2)]),
]


class Source:
    """Groups in order; counts the places that were freed."""

    def __init__(self, groups: list[list[RolloutRecord]]) -> None:
        self.groups, self.freed = list(groups), 0

    async def next_groups(self, count: int) -> list[list[RolloutRecord]]:
        taken, self.groups = self.groups[:count], self.groups[count:]
        assert taken, "asked for more groups than there are"
        return taken

    def release(self, groups: int) -> None:
        self.freed += groups


def collect(source: Source, policy: Any, bound: int | None, log_lines: list[str] | None = None) -> Batch:
    log = log_lines.append if log_lines is not None else (lambda text: None)
    return asyncio.run(collect_batch(source, 2, trainer_version=TRAINER, policy=policy, bound=bound, log=log))


def step(batch: Batch) -> tuple[StepMetrics, list[float]]:
    """The metrics, and the gradient: plain gradient descent with rate 1 moves each weight by exactly that."""
    model = Unigram(WEIGHTS)
    metrics = grpo_step(model, torch.optim.SGD(model.parameters(), lr=1.0), batch.samples(), CONFIG)
    moved = model.head.weight.detach().flatten().tolist()
    return metrics, [before - after for before, after in zip(WEIGHTS, moved, strict=True)]


def reference(groups: list[list[RolloutRecord]], importance: Any) -> tuple[float, list[float]]:
    """Loss and gradient. `importance(lag, ratio)`: a token's weight, None for one that has no place in the mean."""
    terms: list[tuple[float, int]] = []  # importance * advantage, token
    places = 0
    for group in groups:
        rewards = [r.reward for r in group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        for record in group:
            advantage = (record.reward - mean) / (std + 1e-6)
            for i, token in enumerate(record.output_ids):
                lag = TRAINER - int(record.spans[i].version[1:])
                weight = importance(lag, math.exp(now(token) - record.logprobs[i]))
                if weight is not None:
                    terms.append((weight * advantage, token))
                    places += 1
    loss = -sum(factor * now(token) for factor, token in terms) / places
    gradient = [
        -sum(factor * ((token == j) - math.exp(now(j))) for factor, token in terms) / places
        for j in range(len(WEIGHTS))
    ]
    return loss, gradient


def truncated(lag: int, ratio: float) -> float:
    return min(ratio, 2.0)


def masked(lag: int, ratio: float) -> float | None:
    return None if lag > 1 else min(ratio, 2.0)


def corrected(lag: int, ratio: float) -> float:
    return 0.0 if lag > 1 and not 0.5 <= ratio <= 5.0 else min(ratio, 2.0)


def check(batch: Batch, groups: list[list[RolloutRecord]], importance: Any) -> StepMetrics:
    metrics, gradient = step(batch)
    loss, expected = reference(groups, importance)
    assert metrics.loss == pytest.approx(loss, abs=1e-6, rel=0)
    assert gradient == pytest.approx(expected, abs=1e-6, rel=0)
    assert metrics.grad_norm == pytest.approx(math.hypot(*expected), abs=1e-6, rel=0)
    return metrics


@pytest.mark.parametrize("policy", ["drop", "mask_tokens", "correct"])
def test_without_a_bound_every_policy_is_the_truncated_loss(policy: Any) -> None:
    metrics = check(collect(Source([A, B]), policy, None), [A, B], truncated)
    assert (metrics.tokens, metrics.stale_tokens) == (15, 0)


def test_masked_tokens_have_no_place_in_the_loss() -> None:
    batch = collect(Source([A, B]), "mask_tokens", 1)
    metrics = check(batch, [A, B], masked)
    assert metrics.tokens == 15 - 3 - 2 - 2
    assert metrics.reward_mean == pytest.approx((1.0 + 0.25 + 0.5) / 5)  # the rewards of masked rollouts still count


def test_corrected_tokens_are_truncated_and_masked_by_their_ratio() -> None:
    metrics = check(collect(Source([A, B]), "correct", 1), [A, B], corrected)
    assert (metrics.tokens, metrics.stale_tokens) == (15, 7)
    assert (metrics.masked_ratio_low, metrics.masked_ratio_high) == (1, 1)  # 0.4 of a2, 6.0 of a3
    assert metrics.clipped_share == pytest.approx(4 / 15)  # 3.0 and 7.0 of a1, 4.0 of a3, 2.5 of b2


def test_dropped_rollouts_leave_the_loss_and_their_group() -> None:
    source = Source([A, B])
    batch = collect(source, "drop", 2)  # a3 alone is over the bound
    assert [j.record.receipt for j in batch.kept] == ["a1", "a2", "b1", "b2"]
    assert [(j.record.receipt, j.decision.label) for j in batch.dropped] == [("a3", "drop_lag_over_bound")]
    assert (source.freed, batch.lag.max) == (0, 2)
    metrics = check(batch, [A[:2], B], truncated)
    assert metrics.tokens == 12


def test_a_group_that_is_dropped_is_replaced_and_its_place_freed() -> None:
    """With a bound of 1, a and b keep one rollout each, which has nothing to be compared with."""
    log_lines: list[str] = []
    source = Source([A, B, C, D])
    batch = collect(source, "drop", 1, log_lines)
    assert [j.record.receipt for j in batch.kept] == ["c1", "c2", "d1", "d2"]
    labels = {j.record.receipt: j.decision.label for j in batch.dropped}
    assert {labels[r] for r in ("a1", "b1")} == {"drop_group_too_small"}
    assert {labels[r] for r in ("a2", "a3", "b2")} == {"drop_lag_over_bound"}
    assert source.freed == 2
    assert log_lines == ["staleness: 2 of 2 groups are over max_version_lag=1; waiting for others"]
    check(batch, [C, D], truncated)


def test_a_step_with_every_token_masked_leaves_weights_and_optimizer() -> None:
    model = Unigram(WEIGHTS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    grpo_step(model, optimizer, collect(Source([A, B]), "correct", None).samples(), CONFIG)  # gives Adam a momentum
    before = model.head.weight.detach().clone()
    stale = [rollout(f"s{i}", float(i), [(0, 2, 1.0), (1, 3, 1.0)]) for i in range(2)]
    batch = asyncio.run(collect_batch(Source([stale]), 1, trainer_version=TRAINER, policy="mask_tokens", bound=1))
    metrics = grpo_step(model, optimizer, batch.samples(), CONFIG)
    assert (metrics.tokens, metrics.loss) == (0, 0.0)
    assert torch.equal(before, model.head.weight)


def test_a_rollout_from_the_future_is_refused() -> None:
    with pytest.raises(StalenessError, match="rollout f1 was sampled by version v4, 1 ahead"):
        collect(Source([[rollout("f1", 1.0, [(0, -1, 1.0)])], B]), "correct", None)


def test_the_reference_can_fail() -> None:
    """The three losses differ by far more than the tolerance, so that agreeing with one means something."""
    losses = [reference([A, B], f)[0] for f in (truncated, masked, corrected)]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3


def test_two_equal_tokens_by_hand() -> None:
    """Two token ids of probability 1/2, log-prob -ln 2; rewards 1 and 0, so advantages +1 and -1 (std 1/2).

    r1: one fresh token, ratio 1. r2: a stale one of ratio 4 (cut to 2), and a stale one of ratio 8 (masked).
    correct:  -(1 * 1 - 2 * 1 - 0) * (-ln 2) / 3 = -ln 2 / 3      mask_tokens:  -(1 * 1) * (-ln 2) / 1 = ln 2
    """
    half = -math.log(2)

    def record(name: str, reward: float, lag: int, ratios: list[float]) -> RolloutRecord:
        base = rollout(name, reward, [(i % 2, lag, 1.0) for i in range(len(ratios))])
        return replace(base, logprobs=tuple(half - math.log(r) for r in ratios))

    group = [record("x1", 1.0, 0, [1.0]), record("x2", 0.0, 2, [4.0, 8.0])]
    cases: tuple[tuple[Any, float], ...] = (("correct", half / 3), ("mask_tokens", -half))
    for policy, expected in cases:
        model = Unigram((0.0, 0.0))
        batch = asyncio.run(collect_batch(Source([group]), 1, trainer_version=TRAINER, policy=policy, bound=1))
        metrics = grpo_step(model, torch.optim.SGD(model.parameters(), lr=1.0), batch.samples(), CONFIG)
        # The advantages are 1 / (1 + 2e-6) for the epsilon beside the std of 1/2.
        assert metrics.loss * (1 + 2e-6) == pytest.approx(expected, abs=1e-6, rel=0)
