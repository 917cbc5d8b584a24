"""slime's own loops on the CPU through our entry points: they end, with the versions and log-probs that they should.

The control stands in the asynchronous run: its rollouts are one version behind the trainer, and the same measure that
is under 1e-3 for the current version shows it.
"""

from __future__ import annotations

import os

import pytest

from slime_backend.cpu.flags import cpu_flags
from tests.launch_scripts import printed
from tests.slime.jobs import JOB, ROOT, job_flags, run_job

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.timeout(900)]

SAME_WEIGHTS = 1e-3


def test_train(slime_run):
    run = slime_run()
    assert run.returncode == 0, run.tail()
    for rollout_id in range(2):
        assert run.versions(rollout_id) == [[str(rollout_id + 1)]] * 8
    assert len(run.logprob_diffs) == 2
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def test_train_async_is_one_version_behind(slime_run):
    run = slime_run("--num-rollout", "3", loop="train_async")
    assert run.returncode == 0, run.tail()
    # Rollout 0 and the one that is generated while 0 is trained on are both of version 1.
    assert [run.versions(rollout_id)[0] for rollout_id in range(3)] == [["1"], ["1"], ["2"]]
    fresh, *stale = run.logprob_diffs
    assert fresh < SAME_WEIGHTS
    assert min(stale) > SAME_WEIGHTS


@pytest.mark.soak
def test_train_on_a_ray_that_runs_already(tiny_flags, tmp_path):
    flags = ["slime_backend.slime_hooks.train", *job_flags(tiny_flags, tmp_path, ["--num-rollout", "1"])]
    run = run_job("tests.slime.on_cluster", flags, tmp_path)
    assert run.returncode == 0, run.tail()
    assert "Connecting to existing Ray cluster" in run.log
    assert run.versions(0) == [["1"]] * 8
    assert max(run.logprob_diffs) < SAME_WEIGHTS


@pytest.mark.soak
def test_a_launch_script_for_gpus_runs_on_a_tiny_model(tiny_flags, tmp_path):
    """With its own flags, but for the model, the number of places, the sizes and the reward."""
    job = printed("slime_qwen3_4b_disjoint", SLIME_SRC=os.environ["SLIME_SRC"], RUNS=str(tmp_path))
    small = {name: JOB[name] for name in JOB if not name.startswith(("--lr", "--advantage", "--optimizer"))}
    flags = [*job, *tiny_flags, *(word for pair in small.items() for word in pair)]
    flags += ["--tensor-model-parallel-size", "1", "--save-debug-rollout-data", f"{tmp_path}/rollout_{{rollout_id}}.pt"]
    run = run_job("slime_backend.slime_hooks.train", flags, tmp_path)
    assert run.returncode == 0, run.tail()
    assert "disjoint, prefix sharing retract: pause retract, radix cache on, then flush" in run.log
    assert [run.versions(rollout_id)[0] for rollout_id in range(2)] == [["1"], ["2"]]
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def test_without_our_hook_in_the_workers_the_job_fails(tiny_flags, tmp_path):
    """The control of the hook: slime's own train.py on the CPU."""
    flags = job_flags(tiny_flags, tmp_path, ["--num-rollout", "1", *cpu_flags([])])
    run = run_job("train", flags, tmp_path, environment={"PYTHONPATH": f"{ROOT}:{os.environ['SLIME_SRC']}"})
    assert run.returncode != 0
    assert "Unknown accelerator 'cpu'" in run.log
