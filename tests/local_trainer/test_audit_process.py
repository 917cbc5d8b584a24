"""The audit process of a local run: it reports, it ends with the run, it dies with the trainer, and where it fails the
run audits at its end.

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
from slime_backend.local_trainer.audit_process import AuditProcess
from tests.local_trainer.fake_runs import fake_fleet
from tests.processes import below_with, is_running, wait_gone
from tests.waiting import wait_until

STARTING = """
import pathlib, sys, time
from slime_backend.config import AuditConfig
from slime_backend.local_trainer.audit_process import AuditProcess
from slime_backend.ledger.writer import Ledger
run_dir = pathlib.Path(sys.argv[1])
ledger = Ledger(run_dir)
audit_process = AuditProcess(AuditConfig(), run_dir)
audit_process.start()
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
    log_lines = []
    work = loop.train(config, config.run_dir, resume=False, reporter=loop.Reporter(log=log_lines.append))
    return asyncio.run(asyncio.wait_for(work, 400)), log_lines


def test_the_run_ends_with_the_result_of_its_audit_process(config, monkeypatch):
    summary, log_lines = train(config, monkeypatch)
    audit = summary["audit"]
    assert summary["completed"]
    assert audit["finished"]
    assert audit["recorded"] == summary["rollouts_completed"]
    assert audit["violations"] == audit["rollouts"] >= 12
    assert audit["verdict"]["outcome"] == "contaminated"
    assert sum(line.startswith("audit violation: ") for line in log_lines) > 0
    assert not any("ended early" in line for line in log_lines)
    assert json.loads((config.run_dir / "audit.json").read_text())["finished"]
    assert below_with(str(config.run_dir)) == []


def test_an_audit_that_fails_is_made_at_the_end_and_the_training_goes_on(config, monkeypatch):
    monkeypatch.setattr(AuditProcess, "command", lambda self: [sys.executable, "-c", "raise SystemExit('no memory')"])
    summary, log_lines = train(config, monkeypatch)
    assert summary["completed"]
    assert summary["audit"]["rollouts"] == 12
    assert "the audit process ended early (no memory); the audit is made now" in log_lines


def test_a_violation_is_returned_once(config, tmp_path):
    from slime_backend.audit import follow as audit_follow
    from slime_backend.audit.audit import AuditResult, Violation

    audit_process = AuditProcess(config.audit, tmp_path)
    assert list(audit_process.new_violations()) == []
    found = [Violation(f"r{i}", "engine0", "v1", "log-prob", 0.1, 0, "differs", "wrong label") for i in range(3)]
    returned = []
    for count in (1, 1, 3):
        audit_follow.save(tmp_path, AuditResult(3, 3, violations=found[:count]))
        returned.append([v.receipt for v in audit_process.new_violations()])
    assert returned == [["r0"], [], ["r1", "r2"]]


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
        assert all(is_running(p.pid) for p in tree)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert wait_gone([p.pid for p in tree]) == []


def test_it_is_stopped_with_a_run_that_fails(config, tmp_path):
    audit_process = AuditProcess(config.audit, tmp_path)
    with Ledger(tmp_path):
        audit_process.start()
        wait_until(lambda: below_with("--follow"), "the audit runs")
        audit_process.stop()
        audit_process.stop()
    assert not below_with("--follow")
