"""The summary's counts of rollouts, from files."""

from __future__ import annotations

import json

from slime_backend.report.summary import summarise, write_summary

from .examples import SEGMENTS, example


def test_classes_add_up_and_traits_are_counted_for_themselves(tmp_path):
    records = [example(name) for name in SEGMENTS]
    (tmp_path / "submitted.jsonl").write_text("".join(json.dumps({"receipt": r.receipt}) + "\n" for r in records))
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(r.to_json()) + "\n" for r in records))
    summary = summarise(tmp_path)
    assert summary["rollout_classes"] == {"pure": 1, "recomputed": 1, "mixed": 1, "carried": 2}
    assert sum(summary["rollout_classes"].values()) == summary["rollouts_completed"] == len(records)
    assert (summary["rollouts_mixed"], summary["rollouts_carried"], summary["rollouts_retracted"]) == (2, 2, 2)
    assert write_summary(tmp_path, {"x": 1})["x"] == 1
    assert json.loads((tmp_path / "summary.json").read_text())["rollout_classes"] == summary["rollout_classes"]


def test_a_run_without_rollouts_has_a_summary(tmp_path):
    summary = summarise(tmp_path)
    assert summary["rollouts_completed"] == 0
    assert set(summary["rollout_classes"].values()) == {0}


def test_staleness_is_added_up_over_steps(tmp_path):
    steps = [
        {
            "reward_mean": 0.1,
            "lag_mean": 1.0,
            "lag_max": 2,
            "staleness": {"drop_lag_over_bound": 2, "tokens_masked": 0},
        },
        {
            "reward_mean": 0.3,
            "lag_mean": 0.0,
            "lag_max": 0,
            "staleness": {"drop_lag_over_bound": 1, "tokens_masked": 7},
        },
        {"reward_mean": 0.3, "lag_mean": 0.0, "lag_max": 0},  # a step of a run from before decisions were counted
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    assert summarise(tmp_path)["staleness"] == {"drop_lag_over_bound": 3, "tokens_masked": 7}
