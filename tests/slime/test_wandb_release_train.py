"""W&B of a job whose trainer is killed after each step (`--release-train`): no row is lost with it."""

from __future__ import annotations

import pytest

from tests.slime.wandb_checks import assert_closing_summary, assert_w_and_b_is_complete

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = (
    *("--reef-run-dir", "{dir}/reef", "--release-train", "--save", "{dir}/checkpoints", "--save-interval", "1"),
    "--no-save-optim",  # without Transformer Engine, Megatron-core's optimizer doesn't load what it saved
    *("--update-weight-transport", "disk", "--update-weight-disk-dir", "{dir}/weights"),
    *("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g"),
    *("--wandb-dir", "{dir}/wandb"),
)


def test_every_publication_and_step_of_a_released_trainer_is_there(slime_run):
    run = slime_run(*FLAGS)
    assert run.returncode == 0, run.tail()
    assert_w_and_b_is_complete(run, steps=2)
    assert_closing_summary(run, publications=3)
