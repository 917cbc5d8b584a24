"""One asynchronous slime job, and everything that its rollouts leave behind: spans in the saved samples, masks, the
ledger, its audit, and metrics in slime's own W&B run. Every rollout but the first is one version behind the trainer."""

from __future__ import annotations

import pytest

from slime_backend.audit.audit import audit_run
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.simulation.models import load_model
from tests.slime.wandb_checks import assert_closing_summary, assert_w_and_b_is_complete, only_wandb_file
from tests.wandb_files import history

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.timeout(900)]

ROLLOUTS, SAMPLES = 3, 8
FLAGS = (
    *(
        "--num-rollout",
        str(ROLLOUTS),
        "--disjoint-prefix-sharing",
        "--reef-run-dir",
        "{dir}/reef",
        "--reef-save-weights",
    ),
    *("--max-version-lag", "0", "--staleness", "mask_tokens"),
    *("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g"),
    *("--wandb-dir", "{dir}/wandb"),  # with slime's random suffix, as its own scripts have it
)


@pytest.fixture(scope="module")
def run(slime_run):
    done = slime_run(*FLAGS, loop="train_async")
    assert done.returncode == 0, done.tail()
    return done


def spans_of(sample):
    return [span for call in sample["metadata"]["reef_slime"]["calls"] for span in call["spans"]]


def test_saved_samples_say_who_sampled_each_token(run):
    for rollout_id in range(ROLLOUTS):
        for sample in run.samples(rollout_id):
            spans = spans_of(sample)
            assert [s["version"] for s in spans] == sample["weight_versions"]
            assert (spans[0]["start"], spans[-1]["end"]) == (0, sample["response_length"])


def test_what_is_behind_the_trainer_is_masked(run):
    masks = [{tuple(set(s["loss_mask"])) for s in run.samples(rollout_id)} for rollout_id in range(ROLLOUTS)]
    assert masks == [{(1,)}, {(0,)}, {(0,)}]
    steps = list(read_jsonl(run.directory / "reef" / "steps.jsonl"))
    assert [s["lag_max"] for s in steps] == [0, 1, 1]
    assert [s["staleness"]["mask_lag_over_bound"] for s in steps] == [0, SAMPLES, SAMPLES]


def test_every_rollout_is_in_the_ledger_once(run):
    saved = [s for rollout_id in range(ROLLOUTS) for s in run.samples(rollout_id)]
    receipts = {c["receipt"] for s in saved for c in s["metadata"]["reef_slime"]["calls"]}
    with open_reader(run.directory / "reef") as reader:
        records = list(reader.find(Query()))
    assert {r.receipt for r in records} == receipts
    assert len(records) == len(receipts) == ROLLOUTS * SAMPLES
    assert {r.rollout_class for r in records} == {"pure"}
    assert sorted(r.reward for r in records) == pytest.approx(sorted(s["reward"] for s in saved))


def test_the_audit_finds_nothing_and_would_have(run):
    directory = run.directory / "reef"
    result = audit_run(directory, load_model)
    assert (result.rollouts, result.violations) == (ROLLOUTS * SAMPLES, [])
    versions = sorted(path.name for path in (directory / "weights").iterdir())
    assert versions == ["1", "2", "3", "4", "default"]
    # The control: the same rollouts, with version 1's weights put in the place of version 2's.
    (directory / "weights" / "2").rename(directory / "weights" / "kept")
    (directory / "weights" / "2").symlink_to(directory / "weights" / "1", target_is_directory=True)
    try:
        assert len(audit_run(directory, load_model).violations) == SAMPLES
    finally:
        (directory / "weights" / "2").unlink()
        (directory / "weights" / "kept").rename(directory / "weights" / "2")


def test_metrics_are_in_slime_s_own_w_and_b_run(run):
    rows = history(only_wandb_file(run.directory))
    ours = [row for row in rows if "reef/version_lag_max" in row]
    assert [(row["rollout/step"], row["reef/version_lag_max"]) for row in ours] == [(0, 0), (1, 1), (2, 1)]
    assert all(row["reef/audit_contradictions"] == row["reef/samples_without_spans"] == 0 for row in ours)
    assert all(row["reef/class_pure"] == SAMPLES for row in ours)
    assert len([row for row in rows if "rollout/response_len/mean" in row]) == ROLLOUTS  # slime's own are there too


def test_w_and_b_has_every_publication_and_every_training_step_once(run):
    assert_w_and_b_is_complete(run, steps=ROLLOUTS)


def test_the_last_lines_say_what_there_is_and_where(run):
    assert_closing_summary(run, publications=ROLLOUTS + 1)
    assert f"audit {run.directory / 'reef'}" in run.log


def test_a_start_that_succeeded_shows_no_traceback(run):
    assert "Traceback" not in run.log
