"""A local run that is interrupted and goes on, on a fake engine (with real engines and Ctrl-C: test_run_engine.py)."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from slime_backend.config import RunConfig
from slime_backend.local_trainer import loop
from slime_backend.local_trainer.checkpoint import load_trainer_state
from slime_backend.run_files.jsonl import read_jsonl
from tests.local_trainer.fake_runs import fake_fleet


def test_a_cancelled_run_leaves_a_summary_and_goes_on_where_it_stood(tmp_path, tiny_directory, monkeypatch):
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = RunConfig(
        runs_dir=str(tmp_path),
        model=str(tiny_directory),
        disjoint_prefix_sharing="retract",
        steps=4,
        groups_per_step=3,
        samples_per_group=2,
        groups_ahead=3,
        audit_rollouts=0,
        wandb="disabled",
    )

    async def interrupted():
        second_step = asyncio.Event()

        def log(line):
            if line.startswith("step   2/"):
                second_step.set()

        run = asyncio.create_task(
            loop.train(config, config.run_dir, resume=False, reporter=loop.Reporter(log=log)),
        )
        await second_step.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(asyncio.wait_for(interrupted(), 60))
    partial = json.loads((config.run_dir / "summary.json").read_text())
    assert not partial["completed"]
    assert 2 <= partial["steps"] <= 3

    # As if it had been ended between the weights and the state of the next step: that version was never published.
    left = config.run_dir / "weights" / f"v{load_trainer_state(config.run_dir)['step'] + 1}"
    shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(config.run_dir / "weights" / "v0", left)
    (left / "of-an-earlier-attempt").touch()
    (config.run_dir / "weights" / "v9-mine").mkdir()

    work = loop.train(config, config.run_dir, resume=True, reporter=loop.Reporter(log=lambda line: None))
    summary = asyncio.run(asyncio.wait_for(work, 60))
    assert summary["completed"]
    assert [row["step"] for row in read_jsonl(config.run_dir / "steps.jsonl")] == [1, 2, 3, 4]
    assert [row["version"] for row in read_jsonl(config.run_dir / "publications.jsonl")][-1] == "v4"
    assert summary["rollouts_doubled"] == 0
    assert (left / "config.json").is_file()
    assert not (left / "of-an-earlier-attempt").exists()
    assert (config.run_dir / "weights" / "v9-mine").is_dir()
