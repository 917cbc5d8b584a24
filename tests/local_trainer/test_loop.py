"""The complete loop without an engine: real training on a tiny model, a report of each publication as the fleet would
give it, and trackers that work, that fail in the middle, or that are absent.

Engines, requests and publications are faked here; tests/test_run_engine.py has the real ones.
"""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slime_backend.config import make_config
from slime_backend.errors import RunError
from slime_backend.fleet.weights import WeightRecords
from slime_backend.local_trainer import loop
from slime_backend.policy import decide
from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.report import write
from slime_backend.tracking.tracker import Tracker
from tests.provenance.examples import example

STEPS, GROUP = 3, 2


class Worker:
    """Groups of two rollouts with different rewards, all sampled by v0."""

    def __init__(self, *args) -> None:
        self.counts = SimpleNamespace(resubmitted=0)
        self.made = 0

    def start(self) -> None: ...

    def release(self, groups: int) -> None: ...

    async def next_groups(self, count: int):
        def one(i: int):
            self.made += 1
            return replace(example("pure"), receipt=f"r{self.made}", reward=float(i))

        return [[one(i) for i in range(GROUP)] for _ in range(count)]

    async def stop(self) -> None: ...


class Writer:
    directory: str | None = None

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.calls = fails_at, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fails_at:
            raise ConnectionError("the service is gone")

    def log(self, family, step, row):
        self._call(f"{family} {step}")

    def alert(self, alert):
        self._call(f"{alert.title}: {alert.text}")

    def finish(self, summary, table):
        self._call(f"finish {len(table)}")


@pytest.fixture
def train(tmp_path, monkeypatch, run_async):
    """`train(tracker)` runs the loop and returns its summary and log lines. At v2 engine1 is retired."""

    @asynccontextmanager
    async def fleet(*args, **kwargs):
        yield SimpleNamespace(weights=WeightRecords())

    async def publish(fleet, transport, version):
        engines = [EngineOutcome(name, paused_ms=1.0, confirmed=True) for name in ("engine0", "engine1")]
        if version == "v2":
            engines[1] = EngineOutcome("engine1", failed_step="load", reason="disk full")
        return PublicationReport(
            version, "v0", decide("disjoint", "retract"), "disk", state="resumed", started_at=1.0, engines=engines
        )

    monkeypatch.setattr(loop, "running_fleet", fleet)
    monkeypatch.setattr(loop, "RolloutWorker", Worker)
    monkeypatch.setattr(loop, "publish", publish)
    monkeypatch.setattr(write, "plotly_source", lambda: "/* plotly */")

    def run(tracker: Tracker):
        monkeypatch.setattr(loop, "make_tracker", lambda *args, **kwargs: tracker)
        keys = {"steps": STEPS, "groups_per_step": 1, "samples_per_group": GROUP, "audit_rollouts": 0}
        config = make_config({**keys, "models_dir": str(tmp_path / "models")}, "test")
        log_lines = []
        reporter = loop.Reporter(log=log_lines.append)
        summary = run_async(loop.train(config, tmp_path / "run", resume=False, reporter=reporter), timeout=300)
        return summary, log_lines

    return run


def test_every_step_is_tracked_and_a_retired_engine_is_an_alert(train, tmp_path):
    writer = Writer()
    summary, log_lines = train(Tracker(lambda: writer, "W&B"))
    logged = [[f"{family} {step}" for family in ("train", "rollout", "publication")] for step in (1, 2, 3)]
    alert = "Engine retired: engine1 at v2: load: disk full; 1 of 2 engines go on"
    made_up = writer.calls.pop(0)  # these log-probs are nobody's, and v0's rollouts of step 1 claim to be the trainer's
    assert made_up.startswith("Log-probs differ: step 1: ")
    assert made_up in log_lines
    # A step's rows are logged before its publication begins.
    second = [*logged[1][:2], alert, logged[1][2]]
    assert writer.calls == [*logged[0], *second, *logged[2], f"finish {STEPS * GROUP}"]
    assert (summary["completed"], summary["steps"], summary["publications"]) == (True, STEPS, STEPS)
    assert summary["wandb_run_dir"] is summary["tensorboard_dir"] is None
    assert log_lines[-1] == f"report: {tmp_path / 'run' / 'report.html'}"


@pytest.mark.parametrize("fails_at", [1, 4, 7, 11])
def test_training_goes_on_when_the_tracker_fails_and_says_so_once(train, tmp_path, caplog, fails_at):
    writer = Writer(fails_at)
    with caplog.at_level(logging.WARNING, "slime_backend"):
        summary, _ = train(Tracker(lambda: writer, "W&B"))
    assert (summary["completed"], summary["steps"]) == (True, STEPS)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert len(writer.calls) == fails_at
    log_lines = [r.getMessage() for r in caplog.records if "W&B" in r.getMessage()]
    assert log_lines == ["W&B failed and is off for the rest of the run: ConnectionError: the service is gone"]


def test_training_goes_on_without_a_tracker(train):
    summary, _ = train(Tracker(None))
    assert (summary["completed"], summary["steps"]) == (True, STEPS)


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(28, "No space left on device"), KeyError("x")])
def test_a_summary_that_fails_loses_neither_the_tracker_nor_the_report(train, tmp_path, monkeypatch, error):
    def fails(*args):
        raise error

    monkeypatch.setattr(loop, "write_summary", fails)
    reported, writer = [], Writer()
    monkeypatch.setattr(loop, "report_at_the_end", lambda run_dir, log: reported.append(run_dir))
    with pytest.raises(RunError, match=rf"^no summary: {type(error).__name__}: [^\n]*summary.json is not$"):
        train(Tracker(lambda: writer, "W&B"))
    assert writer.calls[-1] == f"finish {STEPS * GROUP}"
    assert reported == [tmp_path / "run"]
