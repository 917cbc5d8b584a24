"""`--staleness correct` in slime's trainer, against weights by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime_backend.slime_hooks.rollouts.importance import correct


def test_weights_are_truncated_and_untrusted_tokens_get_none():
    ratios = [1.0, 1.5, 3.0, 0.4, 6.0]
    sampled = [torch.full((2,), -2.0), torch.full((3,), -1.0)]
    trained = [
        sampled[0] + torch.tensor([math.log(r) for r in ratios[:2]]),
        sampled[1] + torch.tensor([math.log(r) for r in ratios[2:]]),
    ]
    masks = [torch.ones(2), torch.ones(3)]
    loss, out_masks, figures = correct(
        SimpleNamespace(tis_clip=2.0),
        pg_loss=torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0]),
        train_log_probs=trained,
        rollout_log_probs=sampled,
        loss_masks=masks,
        total_lengths=[4, 5],
        response_lengths=[2, 3],
    )
    assert loss.tolist() == pytest.approx([1.0, -1.5, 2.0, 0.0, 0.0], abs=1e-6)
    assert out_masks is masks
    assert figures["tis"].tolist() == pytest.approx(ratios, rel=1e-6)
    assert figures["tis_clipfrac"].tolist() == [0, 0, 1, 1, 1]
    assert figures["reef_masked_ratio_low"].tolist() == [0, 0, 0, 1, 0]
    assert figures["reef_masked_ratio_high"].tolist() == [0, 0, 0, 0, 1]


def test_the_gradient_takes_the_weight_as_a_constant():
    trained = torch.tensor([-1.0], requires_grad=True)
    loss, _, figures = correct(
        SimpleNamespace(tis_clip=2.0),
        pg_loss=-trained,
        train_log_probs=[trained.detach()],
        rollout_log_probs=[torch.tensor([-1.5])],
        loss_masks=[torch.ones(1)],
    )
    loss.sum().backward()
    assert trained.grad.tolist() == pytest.approx([-math.exp(0.5)])
    assert not any(figure.requires_grad for figure in figures.values())
