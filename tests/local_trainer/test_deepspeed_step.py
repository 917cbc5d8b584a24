"""A step on DeepSpeed is the step of the torch trainer: same weights and metrics, whatever the stage and processes."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from slime_backend.local_trainer.grpo import GrpoConfig, Sample, StepBatch, grpo_step, make_optimizer
from slime_backend.simulation.models import load_model
from tests.needs import needs_deepspeed
from tests.weight_sources.ranks import run_cases

SILENT = 2  # the step without any signal
STEPS = "tests.local_trainer.deepspeed_ranks:steps"
CONFIG = GrpoConfig(learning_rate=1e-3, micro_batch=2, ratio_bound=1e9)


def made(token_ids, group: int, rewards, shared):
    prompt = shared + token_ids(5 + group)
    return [
        {"prompt_ids": prompt, "output_ids": (o := token_ids(4 + i)), "behaviour_logprobs": [-5.0] * len(o)}
        | {"reward": r, "group": group}
        for i, r in enumerate(rewards)
    ]


@pytest.fixture
def batches(token_ids):
    """Two steps of seven samples with a shared prefix, one without any signal between them."""
    shared = token_ids(20)
    signal = [
        [made(token_ids, 0, [1.0, 0.0, 0.5], shared), made(token_ids, 1, [0.0, 1.0, 0.2, 0.7], shared)] for _ in "ab"
    ]
    silent = [made(token_ids, 2, [0.5, 0.5], shared), made(token_ids, 3, [1.0], shared)]
    return [signal[0], silent, signal[1]]


def as_samples(batch):
    return [[Sample(**sample) for sample in group] for group in batch]


@needs_deepspeed
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_step_as_the_torch_trainer(tiny_directory, tmp_path, batches, ranks):
    settings = {"checkpoint": str(tiny_directory), "config": asdict(CONFIG), "batches": batches}
    cases = [{**settings, "stage": stage} for stage in (1, 2, 3)]
    model = load_model(tiny_directory)
    optimizer = make_optimizer(model, CONFIG)
    expected, weights = [], [named(tiny_directory)]
    for batch in batches:
        expected.append(asdict(grpo_step(model, optimizer, as_samples(batch), CONFIG)))
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for case, results in enumerate(run_cases(STEPS, ranks, tmp_path, cases)):
        assert all(result == results[0] for result in results)
        after = [named(tiny_directory)]
        for number in range(1, 4):
            after.append(named(tmp_path / str(case) / f"v{number}"))
            # Adam divides by the size of a gradient, so that of a gradient near 0 a rounding error is left.
            apart = differences(after[number], weights[number])
            assert float(apart.mean()) < 1e-6
            assert float((apart > 1e-4).float().mean()) < 1e-3
            found = results[0][number - 1]
            if number == SILENT:
                assert float(differences(after[number], after[number - 1]).max()) == 0
                found["grad_norm"] = expected[number - 1]["grad_norm"]  # not computed
            else:
                assert float(differences(after[number], after[number - 1]).mean()) > 5e-4
            assert found == pytest.approx(expected[number - 1], rel=1e-4, abs=1e-6)


def named(directory):
    return {name: p.detach() for name, p in load_model(directory).named_parameters()}


def differences(one, other):
    return torch.cat([(one[name] - weight).abs().flatten() for name, weight in other.items()])


def test_ranks_share_out_the_samples_and_run_equally_many_parts(token_ids):
    shared = token_ids(9)
    groups = as_samples([made(token_ids, g, [0.0, 1.0, 0.5], shared) for g in range(3)])
    batch = StepBatch.of(groups, CONFIG)
    for ranks in (1, 2, 4, 12):
        parts = [batch.parts(CONFIG, rank, ranks) for rank in range(ranks)]
        assert len({tuple(map(len, mine)) for mine in parts}) == 1
        counted = [i for mine in parts for part in mine for i, counts in part if counts]
        assert sorted(counted) == list(range(9))
