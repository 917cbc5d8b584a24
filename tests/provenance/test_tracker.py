"""The tracker: a run without it, with W&B offline, with TensorBoard, and with a writer that fails in the middle.

Online W&B is not tested: it needs an account.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest

from slime_backend.tracking.alerts import Alert
from slime_backend.tracking.tracker import TABLE_COLUMNS, Tracker, make_tracker
from tests.provenance.examples import SEGMENTS, example
from tests.wandb_files import read_wandb

ALERT = Alert("Engine retired", "engine1 at v3: load: disk full", "WARN")
RECORDS = [example(name) for name in SEGMENTS]
SUMMARY = {"steps": 2, "reward_last3": 0.5, "rollout_classes": {"pure": 3}, "audit": None}


def use(tracker: Tracker) -> None:
    """What a run of two steps does."""
    for step in (1, 2):
        tracker.log("train", step, {"loss": 0.5 / step, "nothing": None})
        tracker.log("publication", step, {"confirmed": 2})
        tracker.add_rollouts(RECORDS, ["answer|\n"] * len(RECORDS), [0] * len(RECORDS))
    tracker.alert([ALERT])
    tracker.finish(SUMMARY)


def make(run_dir, kind="wandb", mode="offline", artifacts=False) -> Tracker:
    run_dir.mkdir(exist_ok=True)
    settings = {"name": "x", "steps": 2}
    return make_tracker(kind, run_dir, mode=mode, project="p", name="x", settings=settings, artifacts=artifacts)


class FakeWriter:
    """Fails from its nth call on."""

    directory = "somewhere"

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.calls = fails_at, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) >= self.fails_at:
            raise OSError("no space left on device")

    def log(self, family, step, row):
        self._call(f"log {sorted(row)}")

    def alert(self, alert):
        self._call(f"alert {alert.title}")

    def finish(self, summary, table):
        self._call(f"finish {len(table)}")


def test_every_call_reaches_the_writer():
    writer = FakeWriter(fails_at=99)
    use(Tracker(lambda: writer, "W&B"))
    steps = ["log ['train/loss']", "log ['publication/confirmed']"]
    assert writer.calls == [*steps, *steps, "alert Engine retired", "finish 10"]


@pytest.mark.parametrize("fails_at", [1, 3, 5, 6])
def test_a_failure_in_the_middle_is_said_once_and_ends_the_logging(fails_at, caplog):
    writer = FakeWriter(fails_at)
    with caplog.at_level(logging.WARNING):
        use(Tracker(lambda: writer, "W&B"))
    assert len(writer.calls) == fails_at
    expected = "W&B failed and is off for the rest of the run: OSError: no space left on device"
    assert [r.getMessage() for r in caplog.records] == [expected]


def test_a_writer_that_does_not_start_is_said_once(caplog):
    def broken():
        raise RuntimeError("no login")

    tracker = Tracker(broken, "W&B")
    use(tracker)
    assert tracker.directory is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("kind", "module", "extra"), [("wandb", "wandb", "wandb"), ("tensorboard",) * 3])
def test_a_missing_package_is_one_clear_line(tmp_path, monkeypatch, caplog, kind, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    use(make(tmp_path / "run", kind))
    (record,) = caplog.records
    assert f"is off for this run: {module} is not installed; pip install 'reef-slime[{extra}]'" in record.getMessage()


@pytest.mark.parametrize(("kind", "mode"), [("wandb", "disabled"), ("none", "offline")])
def test_without_a_tracker_nothing_is_written_or_said(tmp_path, caplog, kind, mode):
    tracker = make(tmp_path / "run", kind, mode)
    use(tracker)
    assert tracker.directory is None
    assert list((tmp_path / "run").iterdir()) == []
    assert caplog.records == []


def run_of_one_step(tmp_path):
    """The files that artifacts refer to."""
    run_dir = tmp_path / "run"
    (run_dir / "weights" / "v1").mkdir(parents=True)
    (run_dir / "weights" / "v1" / "model.safetensors").write_bytes(b"weights")
    (run_dir / "rollouts.jsonl").write_text(json.dumps(RECORDS[0].to_json()) + "\n")
    (run_dir / "steps.jsonl").write_text(json.dumps({"step": 1, "receipts": ["pure-0001"]}) + "\n")
    return run_dir


def test_online_a_version_uses_the_rollouts_that_trained_it(tmp_path):
    """W&B's side is faked: which calls are made, in which order."""
    pytest.importorskip("wandb", reason="wandb is not installed; pip install 'reef-slime[wandb]'")
    from slime_backend.tracking.wandb_writer import WandbWriter

    calls = []

    class Logged:
        def __init__(self, name):
            self.name = name

        def wait(self, timeout):
            assert timeout
            return self

    class Run:
        def log_artifact(self, artifact):
            calls.append(("log", artifact.name))
            return Logged(artifact.name)

        def use_artifact(self, artifact):
            calls.append(("use", artifact.name))

    run_dir = run_of_one_step(tmp_path)
    writer = WandbWriter(run_dir, mode="offline", project="p", name="x", settings={})
    own = writer._run
    writer._online = True
    writer._log_artifacts(Run())
    own.finish()
    assert calls == [("log", "x-rollouts-v1"), ("use", "x-rollouts-v1"), ("log", "x-weights-v1")]


def test_wandb_offline_has_metrics_alert_table_and_artifacts(tmp_path, caplog):
    pytest.importorskip("wandb", reason="wandb is not installed; pip install 'reef-slime[wandb]'")
    run_dir = run_of_one_step(tmp_path)
    tracker = make(run_dir, artifacts=True)
    use(tracker)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("slime_backend")] == []
    records = read_wandb(run_dir)
    assert str(run_dir) in tracker.directory
    assert [(r.alert.title, r.alert.text) for r in records if r.HasField("alert")] == [(ALERT.title, ALERT.text)]
    keys = {key for r in records if r.HasField("history") for item in r.history.item for key in item.nested_key}
    keys |= {item.key for r in records if r.HasField("history") for item in r.history.item}
    assert {"train/step", "train/loss", "publication/index", "publication/confirmed", "rollouts"} <= keys
    artifacts = {a.name: a for r in records for a in _artifacts(r)}
    assert {"x-rollouts-v1", "x-weights-v1"} <= set(artifacts)
    assert json.loads(artifacts["x-weights-v1"].metadata)["trained_on"] == "x-rollouts-v1"
    assert json.loads(artifacts["x-rollouts-v1"].metadata)["receipts"] == ["pure-0001"]
    references = [e.ref for name in ("x-rollouts-v1", "x-weights-v1") for e in artifacts[name].manifest.contents]
    assert len(references) == 2
    assert all(ref.startswith("file://") for ref in references)  # nothing is copied


def _artifacts(record) -> list:
    found = [record.artifact] if record.HasField("artifact") else []
    if record.HasField("request") and record.request.HasField("log_artifact"):
        found.append(record.request.log_artifact.artifact)
    return found


def lose_the_file(monkeypatch, times):
    """W&B as it is now and then, `times` times in a row: it ends a run without writing what it holds."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; pip install 'reef-slime[wandb]'")
    finish, left = wandb.Run.finish, [times]

    def losing(run):
        finish(run)
        if left[0]:
            left[0] -= 1
            time.sleep(0.5)  # what it writes after the end would be written behind our cut
            for file in Path(run.dir).parent.glob("*.wandb"):
                file.write_bytes(file.read_bytes()[:7])

    monkeypatch.setattr(wandb.Run, "finish", losing)


def test_what_wandb_lost_is_told_once_more(tmp_path, caplog, monkeypatch):
    lose_the_file(monkeypatch, 2)
    run_dir = run_of_one_step(tmp_path)
    tracker = make(run_dir, artifacts=True)
    use(tracker)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("slime_backend")] == []
    records = read_wandb(Path(tracker.directory))
    assert [r.alert.title for r in records if r.HasField("alert")] == [ALERT.title]
    steps = [
        item.value_json for r in records for item in r.history.item if "train/step" in (item.key, *item.nested_key)
    ]
    assert steps == ["1", "2"]
    assert len(list(Path(tracker.directory).rglob("rollouts_*.table.json"))) == 1
    assert sorted(p.name for p in run_dir.iterdir()) == [
        "rollouts.jsonl",
        "steps.jsonl",
        "wandb",
        "wandb_id",
        "weights",
    ]


def test_a_file_that_stays_broken_is_said_once(tmp_path, caplog, monkeypatch):
    lose_the_file(monkeypatch, 99)
    monkeypatch.setattr("slime_backend.tracking.wandb_writer.TIMES", 2)
    tracker = make(tmp_path / "run")
    use(tracker)
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("slime_backend")]
    assert f"W&B left {tracker.directory} without what was written last" in said


def test_wandb_that_breaks_in_the_middle_is_said_once(tmp_path, caplog, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; pip install 'reef-slime[wandb]'")
    tracker = make(tmp_path / "run")
    tracker.log("train", 1, {"loss": 1.0})

    def broken(self, *args, **kwargs):
        raise ConnectionError("the service is gone")

    run = wandb.run
    monkeypatch.setattr(type(run), "log", broken)
    use(tracker)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("slime_backend")]
    assert said == ["W&B failed and is off for the rest of the run: ConnectionError: the service is gone"]
    run.finish()


def test_tensorboard_has_metrics_alert_and_table(tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install 'reef-slime[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = make(tmp_path / "run", "tensorboard")
    use(tracker)
    assert [r for r in caplog.records if r.name.startswith("slime_backend")] == []
    assert tracker.directory == str(tmp_path / "run" / "tensorboard")
    events = EventAccumulator(tracker.directory)
    events.Reload()
    assert [(s.step, round(s.value, 3)) for s in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["alerts/text_summary"] == f"WARN: {ALERT.title}: {ALERT.text}"
    assert "| reward_last3 | 0.5 |" in texts["summary/text_summary"]
    rows = texts["rollouts/text_summary"].splitlines()
    assert len(rows) == 2 + 2 * len(RECORDS)
    assert all(row.count("|") == len(TABLE_COLUMNS) + 1 for row in rows)
