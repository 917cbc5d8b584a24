"""`trainer: deepspeed` in the loop, on real DeepSpeed with two processes: a run, an interruption and the resume, a rank
that is killed. Engines and publications are faked here; tests/test_run_engine.py has them real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend.config import ConfigError, make_config
from slime_backend.errors import RunError
from slime_backend.simulation.models import load_model
from tests.needs import needs_deepspeed

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "disjoint_prefix_sharing": "retract",
    "trainer": "deepspeed",
    "zero_stage": 3,
    "trainer_processes": 2,
    "groups_per_step": 3,
    "samples_per_group": 2,
    "groups_ahead": 3,
    "audit_rollouts": 0,
    "tracker": "none",
}


@pytest.fixture
def run(tmp_path, tiny_directory):
    """`run("resume", steps=...)`: what one run of the loop printed."""

    def go(*words, **keys):
        settings = json.dumps({**KEYS, "runs_dir": str(tmp_path), "model": str(tiny_directory), **keys})
        command = [sys.executable, "-m", "tests.local_trainer.deepspeed_loop", settings, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    return go


@needs_deepspeed
def test_a_run_and_its_resume_and_nothing_is_left_running(run, tmp_path):
    assert "ranks: 1, 0" in run(steps=2)
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["completed"], summary["steps"], summary["publications"]) == (True, 2, 2)
    assert "ranks: 1, 0" in run("resume", steps=3)
    resumed = json.loads((folder / "summary.json").read_text())
    assert (resumed["completed"], resumed["steps"], resumed["rollouts_doubled"]) == (True, 3, 0)
    assert sorted(p.name for p in (folder / "weights").iterdir()) == ["v0", "v1", "v2", "v3"]
    assert [p.name for p in (folder / "deepspeed").iterdir() if p.is_dir()] == ["v3"]
    load_model(folder / "weights" / "v3")
    refused = run("resume", steps=4, zero_stage=2)
    assert "'zero_stage': 3" in refused
    assert "can't go on with" in refused


@needs_deepspeed
def test_a_rank_that_is_killed_ends_the_run_with_its_name(run, tmp_path):
    output = run("kill", steps=5)
    assert "RunError: trainer rank 1 ended" in output
    assert "ranks: 1, 0" in output
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["completed"]


def test_more_processes_need_deepspeed():
    with pytest.raises(ConfigError, match="trainer_processes=2 needs trainer=deepspeed"):
        make_config({"trainer_processes": 2}, "test")


def test_without_deepspeed_the_run_says_what_to_install(monkeypatch):
    from slime_backend.local_trainer.deepspeed_step import deepspeed

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RunError, match=r"pip install 'reef-slime\[deepspeed\]'"):
        deepspeed("cpu")
