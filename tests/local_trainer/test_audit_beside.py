"""The audit's own process beside a local run: it reports, it ends with the run, it dies with the trainer, and the run
does without it where it fails.

The engine is a fake whose log-probs are made up, so every rollout is a violation; a real one is in test_run_engine.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from slime_backend.config import RunConfig
from slime_backend.ledger.writer import Ledger
from slime_backend.local_trainer import loop
from slime_backend.local_trainer.audit_beside import AuditBeside
from tests.processes import below_with
from tests.waiting import wait_until

from .test_loop_staleness import fake_fleet

STARTING = """
import pathlib, sys, time
from slime_backend.config import RunConfig
from slime_backend.local_trainer.audit_beside import AuditBeside
from slime_backend.ledger.writer import Ledger
run_dir = pathlib.Path(sys.argv[1])
ledger = Ledger(run_dir)
beside = AuditBeside(RunConfig(), run_dir)
beside.start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def config(tmp_path, tiny_directory):
    return RunConfig(
        runs_dir=str(tmp_path),
        model=str(tiny_directory),
        disjoint_prefix_sharing="retract",
        steps=3,
        groups_per_step=3,
        samples_per_group=2,
        groups_ahead=3,
        audit_rollouts=12,
        audit_beside=True,
        audit_deadline_s=300,
        wandb="disabled",
    )


def train(config, monkeypatch):
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    said = []
    work = loop.train(config, config.run_dir, resume=False, reporter=loop.Reporter(say=said.append))
    return asyncio.run(asyncio.wait_for(work, 400)), said


def test_the_run_ends_with_the_audit_that_went_beside_it(config, monkeypatch):
    summary, said = train(config, monkeypatch)
    audit = summary["audit"]
    assert summary["completed"]
    assert audit["finished"]
    assert audit["recorded"] == summary["rollouts_completed"]
    assert audit["violations"] == audit["rollouts"] >= 12
    assert audit["verdict"]["outcome"] == "contaminated"
    assert sum(line.startswith("audit violation: ") for line in said) > 0
    assert not any("ended early" in line for line in said)
    assert json.loads((config.run_dir / "audit.json").read_text())["finished"]
    assert below_with(str(config.run_dir)) == []


def test_an_audit_that_fails_is_made_at_the_end_and_the_training_goes_on(config, monkeypatch):
    monkeypatch.setattr(AuditBeside, "command", lambda self: [sys.executable, "-c", "raise SystemExit('no memory')"])
    summary, said = train(config, monkeypatch)
    assert summary["completed"]
    assert summary["audit"]["rollouts"] == 12
    assert "the audit beside the training ended early (no memory); it is made now" in said


def test_news_are_told_once(config, tmp_path):
    from slime_backend.audit import follow as audit_follow
    from slime_backend.audit.audit import AuditResult, Violation

    beside = AuditBeside(config, tmp_path)
    assert list(beside.news()) == []
    found = [Violation(f"r{i}", "engine0", "v1", "log-prob", 0.1, 0, "differs", "wrong label") for i in range(3)]
    told = []
    for count in (1, 1, 3):
        audit_follow.save(tmp_path, AuditResult(3, 3, violations=found[:count]))
        told.append([v.receipt for v in beside.news()])
    assert told == [["r0"], [], ["r1", "r2"]]


def tree_of(trainer):
    found = psutil.Process(trainer.pid).children(recursive=True)
    return found if len(found) >= 2 else []


def test_it_does_not_outlive_its_trainer(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", STARTING, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "started\n"
        tree = wait_until(lambda: tree_of(trainer), "the guard and the audit run")
        assert all(p.is_running() for p in tree)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_it_is_stopped_with_a_run_that_fails(config, tmp_path):
    beside = AuditBeside(config, tmp_path)
    with Ledger(tmp_path):
        beside.start()
        wait_until(lambda: below_with("--follow"), "the audit runs")
        beside.stop()
        beside.stop()
    assert not below_with("--follow")
