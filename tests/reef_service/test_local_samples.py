"""A gateway's batch in the local trainer's step; no engine, weights of the tiny model."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from reef_service.api.batches import to_json
from reef_service.client import Batch, Sample
from reef_service.local_samples import not_trainable, to_groups
from reef_service.slime_rollout import metrics_of
from reef_service.slime_rollout import not_trainable as not_slimes
from reef_service.store.samples import StoredSample
from slime_backend.local_trainer.grpo import GrpoConfig, grpo_step, make_optimizer
from slime_backend.simulation.models import load_model
from tests.reef_service.examples import turn

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


def trajectory(*sampled):
    """Make a sample of turns of two tokens each, one after another, sampled as given: (temperature, parameters)."""
    turns = []
    tokens = [1, 2, 3]
    for number, (temperature, sampling) in enumerate(sampled):
        record = turn(f"r{number}", prompt=tokens, output=(70 + number, 80 + number)).record
        turns.append(replace(record, temperature=temperature, sampling=sampling))
        tokens = [*tokens, *record.output_ids]
    response = tokens[3:]
    logprobs = [lp for t in turns for lp in t.logprobs]
    stored = StoredSample("s", 0, "q", 1.0, "pure", 0, [1, 2, 3], response, [1] * len(response), logprobs, turns)
    return Sample.from_json(to_json(stored, 0))


def test_each_turn_is_trained_on_at_its_own_temperature():
    sample = trajectory((0.6, {}), (1.2, {"top_p": 0.9}))
    (group,) = to_groups(Batch("l", 0.0, "v0", [sample]))
    assert list(group[0].temperatures) == [0.6, 0.6, 1.2, 1.2]
    assert list(group[0].loss_mask) == [1, 1, 1, 1]
    assert not_trainable(Batch("l", 0.0, "v0", [sample])) == {}


def test_turns_of_another_distribution_have_no_loss_and_are_named(caplog):
    sample = trajectory((1.0, {}), (0.0, {}), (0.7, {"frequency_penalty": 0.5}), (1.0, {"regex": "a", "top_k": 1}))
    batch = Batch("lease7", 0.0, "v0", [sample])
    with caplog.at_level(logging.WARNING):
        (group,) = to_groups(batch)
    assert list(group[0].loss_mask) == [1, 1] + [0] * 6
    assert not_trainable(batch) == {"greedy": 4, "frequency_penalty": 2}
    (message,) = [r.getMessage() for r in caplog.records]
    assert "lease7" in message
    assert "frequency_penalty: 2" in message


def test_slime_trains_at_one_temperature_only():
    """Its trainer divides all logits by --rollout-temperature, whatever an agent asked for."""
    sample = trajectory((0.7, {}), (1.0, {}), (0.7, {"regex": "a"}))
    assert not_slimes(sample, 0.7) == {"r1": (2, 4), "r2": (4, 6)}
    assert not_slimes(sample, 1.0) == {"r0": (0, 2), "r2": (4, 6)}
    assert metrics_of(Batch("l", 0.0, "v0", [sample]), 0.7)["reef/tokens_not_trainable"] == 4


def test_a_gateway_that_does_not_say_is_taken_for_temperature_one():
    (group,) = to_groups(Batch("l", 0.0, "v0", [sample(0, 1.0)]))
    assert list(group[0].temperatures) == [1.0, 1.0, 1.0]
