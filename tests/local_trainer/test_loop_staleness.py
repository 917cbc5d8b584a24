"""The complete local run on a fake engine, under each staleness policy: decisions are counted, logged and kept apart.

Faked: the engine (slime_backend/simulation); its tokens are all alike, so nothing is learnt. What stale tokens do to
the loss is in test_staleness_loss.py, a real engine under a policy in tests/test_run_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_backend.config import RunConfig
from slime_backend.ledger.files import list_segments, read_rollouts
from slime_backend.local_trainer import loop
from slime_backend.run_files.jsonl import read_jsonl
from tests.local_trainer.fake_runs import fake_fleet

STEPS, GROUPS, SAMPLES = 4, 3, 2


@pytest.fixture
def run(tmp_path: Path, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run(**settings)`: (summary, steps, decisions, run directory)."""
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)

    def go(**settings: Any) -> Any:
        config = RunConfig(
            runs_dir=str(tmp_path),
            model=str(tiny_directory),
            disjoint_prefix_sharing="retract",
            steps=STEPS,
            groups_per_step=GROUPS,
            samples_per_group=SAMPLES,
            groups_ahead=GROUPS,
            audit_rollouts=0,
            wandb="disabled",
            **settings,
        )
        log_lines: list[str] = []
        work = loop.train(config, config.run_dir, resume=False, reporter=loop.Reporter(log=log_lines.append))
        summary = asyncio.run(asyncio.wait_for(work, 120))
        files = (list(read_jsonl(config.run_dir / name)) for name in ("steps.jsonl", "staleness.jsonl"))
        return (summary, *files, config.run_dir)

    return go


def test_without_a_bound_all_is_trained_on(run: Callable[..., Any]) -> None:
    summary, steps, decisions, run_dir = run()
    assert decisions == []
    assert summary["staleness"]["train_within_bound"] == STEPS * GROUPS * SAMPLES
    assert summary["version_lag_max"] > 0, "nothing was stale, so the other tests would show nothing"
    assert all(sum(row["lag_tokens"].values()) == row["tokens"] for row in steps)
    assert sum(summary["rollout_classes"].values()) == summary["rollouts_completed"]
    assert [s.kind for s in list_segments(run_dir)] == ["jsonl"]


def test_dropped_rollouts_are_not_trained_on_and_stay_in_the_ledger(run: Callable[..., Any]) -> None:
    summary, steps, decisions, run_dir = run(staleness="drop", max_version_lag=0, rollouts_segment_mib=0.05)
    trained = {receipt for row in steps for receipt in row["receipts"]}
    dropped = {d["receipt"] for d in decisions}
    recorded = {r["receipt"] for r in read_rollouts(run_dir)}
    assert len(trained) == STEPS * GROUPS * SAMPLES
    assert dropped
    assert not trained & dropped
    assert trained | dropped <= recorded
    assert {d["action"] for d in decisions} == {"drop"}
    counts = summary["staleness"]
    assert counts["drop_lag_over_bound"] + counts["drop_group_too_small"] == len(decisions)
    assert summary["version_lag_max"] == 0
    assert summary["rollouts_lost"] == 0
    assert any(s.kind == "parquet" for s in list_segments(run_dir))


@pytest.mark.parametrize(("policy", "action"), [("mask_tokens", "mask"), ("correct", "correct")])
def test_stale_tokens_are_marked_and_counted(run: Callable[..., Any], policy: str, action: str) -> None:
    summary, steps, decisions, _ = run(staleness=policy, max_version_lag=0)
    assert decisions
    assert {(d["action"], d["reason"]) for d in decisions} == {(action, "lag_over_bound")}
    tokens = sum(d["tokens_over_bound"] for d in decisions)
    looked_at = sum(sum(row["lag_tokens"].values()) for row in steps)
    counts = summary["staleness"]
    assert counts[f"{action}_lag_over_bound"] == len(decisions)
    if policy == "mask_tokens":
        assert counts["tokens_masked"] == tokens == looked_at - sum(row["tokens"] for row in steps)
    else:
        assert counts["tokens_corrected"] == tokens == sum(row["stale_tokens"] for row in steps)
        masked = sum(row["masked_ratio_low"] + row["masked_ratio_high"] for row in steps)
        assert counts["tokens_masked_ratio_low"] + counts["tokens_masked_ratio_high"] == masked > 0
