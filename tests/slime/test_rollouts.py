"""One asynchronous slime job, and everything that its rollouts leave behind: spans in the saved samples, masks, the
ledger, its audit, and metrics in slime's own W&B run. Every rollout but the first is one version behind the trainer."""

from __future__ import annotations

import json

import pytest

from slime_backend.audit.audit import audit_run
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.provenance.jsonl import read_jsonl
from slime_backend.simulation.models import load_model

from ..wandb_files import read_wandb

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
    *("--disable-wandb-random-suffix", "--wandb-dir", "{dir}/wandb"),
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
    rows = []
    for path in (run.directory / "wandb").rglob("*.wandb"):
        for record in read_wandb(path):
            if record.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    ours = [row for row in rows if "reef/version_lag_max" in row]
    assert [(row["rollout/step"], row["reef/version_lag_max"]) for row in ours] == [(0, 0), (1, 1), (2, 1)]
    assert all(row["reef/audit_contradictions"] == row["reef/samples_without_spans"] == 0 for row in ours)
    assert all(row["reef/class_pure"] == SAMPLES for row in ours)
    assert len([row for row in rows if "rollout/response_len/mean" in row]) == ROLLOUTS  # slime's own are there too
