"""A gateway's batch in the local trainer's step; no engine, weights of the tiny model."""

from __future__ import annotations

from dataclasses import replace

import torch

from reef_service.client import Batch, Sample
from reef_service.local_samples import to_groups
from slime_backend.local_trainer.grpo import GrpoConfig, grpo_step, make_optimizer
from slime_backend.local_trainer.models import load_model

SPANS = [{"version": "v0", "start": 0, "end": 3}]


def sample(number, score, response=(65, 66, 67), mask=(1, 0, 1), group="q"):
    logprobs = [-5.5 * m for m in mask]
    return Sample(
        f"s{number}", 0, group, score, "pure", 0, [1, 2, 3], list(response), list(mask), logprobs, SPANS, ["r"], "stop"
    )


def gradient_step(tiny_model, batch):
    torch.manual_seed(0)
    model = load_model(tiny_model)
    config = GrpoConfig()
    metrics = grpo_step(model, make_optimizer(model, config), to_groups(batch), config)
    return metrics, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_batch_trains_the_local_model(tiny_model):
    batch = Batch("l", 0.0, "v0", [sample(0, 0.0), sample(1, 1.0), sample(2, 0.5, group="")])
    groups = to_groups(batch)
    assert [[s.reward for s in group] for group in groups] == [[0.0, 1.0], [0.5]]
    assert groups[0][0].versions == ("v0",)
    metrics, after = gradient_step(tiny_model, batch)
    before = torch.cat([p.detach().flatten() for p in load_model(tiny_model).parameters()])
    assert metrics.tokens == 6  # two of three in each
    assert not torch.equal(after, before)


def test_what_a_trajectory_did_not_sample_is_not_learnt(tiny_model):
    """The last response token has mask 0: what stands there changes nothing. The control: with mask 1 it does."""
    for mask, same in (((1, 1, 0), True), ((1, 1, 1), False)):
        one = Batch("l", 0.0, "v0", [sample(i, float(i), mask=mask) for i in range(2)])
        other = replace(one, samples=[replace(s, response_ids=[65, 66, 90]) for s in one.samples])
        assert torch.equal(gradient_step(tiny_model, one)[1], gradient_step(tiny_model, other)[1]) == same
