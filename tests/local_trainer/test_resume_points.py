"""A run that ends at each point between two steps goes on without a gap, in its own files and in W&B's.

The end is an error that nothing of the run catches, raised where the point is, behind which no file of the run is
written anymore: as a kill, but for what the operating system would still do. W&B is the real package, offline; of its
first file everything is cut off that a kill loses.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import asdict

import pytest

from slime_backend.config import RunConfig
from slime_backend.errors import RunError
from slime_backend.ledger.lock import lock_run
from slime_backend.local_trainer import loop
from slime_backend.run_files.jsonl import JsonlWriter, read_jsonl
from slime_backend.simulation.models import make_tiny_model
from tests.local_trainer.fake_runs import STEPS, config_of, fake_fleet
from tests.waiting import wait_until
from tests.wandb_files import read_wandb

AT = 2
POINTS = ("before the row", "after the row", "weights saved", "state saved", "published", "after the line")


class Killed(BaseException):
    pass


def end_at(patch, point):
    """End the run at `point` of step AT."""

    def after(owner, name, ends, before=False):
        original = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            if before and ends(self, args):
                raise Killed(point)
            result = original(self, *args, **kwargs)
            if ends(self, args):
                raise Killed(point)
            return result

        patch.setattr(owner, name, wrapped)

    def row_of(name, key, value):
        return lambda self, args: self.path.name == name and args[0][key] == value

    step_row = row_of("steps.jsonl", "step", AT)
    line = row_of("publications.jsonl", "version", f"v{AT}")
    if point in ("before the row", "after the row"):
        after(JsonlWriter, "append", step_row, before=point == "before the row")
    elif point in ("published", "after the line"):
        after(JsonlWriter, "append", line, before=point == "published")
    else:
        original = loop.make_trainer

        def make(*args):
            trainer = original(*args)
            save = trainer.save_state

            def save_state(run_dir, step):
                if step == AT and point == "weights saved":
                    raise Killed(point)
                save(run_dir, step)
                if step == AT:
                    raise Killed(point)

            trainer.save_state = save_state
            return trainer

        patch.setattr(loop, "make_trainer", make)
    # A kill leaves no summary and ends no tracker.
    patch.setattr(loop, "write_summary", lambda *args: {})
    patch.setattr(loop.Tracker, "finish", lambda self, summary: None)


def run(config, resume):
    log_lines = []
    work = loop.train(config, config.run_dir, resume=resume, reporter=loop.Reporter(log=log_lines.append))
    return asyncio.run(asyncio.wait_for(work, 60)), log_lines


def history(path):
    """Metric -> step of its family -> every value that was logged."""
    found = defaultdict(lambda: defaultdict(set))
    for record in read_wandb(path):
        if record.HasField("history"):
            row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            for axis in ("train/step", "rollout/step", "publication/index"):
                if axis in row:
                    for name, value in row.items():
                        if name.split("/")[0] == axis.split("/")[0]:
                            found[name][row[axis]].add(value)
    return found


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_ends_between_two_steps_goes_on_without_a_gap(tmp_path, tiny_directory, monkeypatch, point):
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = config_of(tmp_path, tiny_directory, tracker="none")
    with monkeypatch.context() as patch:
        end_at(patch, point)
        with pytest.raises(Killed):
            run(config, resume=False)
    summary, log_lines = run(config, resume=True)
    steps = list(read_jsonl(config.run_dir / "steps.jsonl"))
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["receipts"] for row in steps)
    publications = list(read_jsonl(config.run_dir / "publications.jsonl"))
    assert [row["version"] for row in publications] == [f"v{step}" for step in range(1, STEPS + 1)]
    unknown = [row["version"] for row in publications if row["state"] == "unknown"]
    assert unknown == ([f"v{AT}"] if point in ("state saved", "published") else [])
    again = list(read_jsonl(config.run_dir / "steps.superseded.jsonl"))
    assert [row["step"] for row in again] == ([AT] if point in ("after the row", "weights saved") else [])
    assert (summary["completed"], summary["steps"], summary["publications_unknown"]) == (True, STEPS, len(unknown))
    assert any("isn't known" in line for line in log_lines) == bool(unknown)


def test_wandb_has_every_step_after_a_kill_that_left_it_nothing(tmp_path, tiny_directory, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; pip install 'reef-slime[wandb]'")
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = config_of(tmp_path, tiny_directory, wandb="offline")
    with monkeypatch.context() as patch:
        end_at(patch, "published")
        with pytest.raises(Killed):
            run(config, resume=False)
    wandb.run.finish()
    (first,) = wait_until(lambda: [*(config.run_dir / "wandb").rglob("*.wandb")], "W&B's process has written the run")
    earlier = history(first)
    summary, _ = run(config, resume=True)
    (second,) = [path for path in (config.run_dir / "wandb").rglob("*.wandb") if path != first]
    found = history(second)
    assert set(found["train/loss"]) == set(found["rollout/version_lag_mean"]) == set(range(1, STEPS + 1))
    assert set(found["publication/wall_ms"]) == {1, 3, 4}  # whether v2 was published isn't known
    for name, steps in found.items():
        for step, values in steps.items():
            assert len(values | earlier[name][step]) == 1, (name, step)
    assert summary["wandb_run_dir"] == str(second.parent)


def test_tensorboard_has_every_step_after_a_kill(tmp_path, tiny_directory, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = config_of(tmp_path, tiny_directory, tracker="tensorboard")
    with monkeypatch.context() as patch:
        end_at(patch, "published")
        with pytest.raises(Killed):
            run(config, resume=False)
    before = EventAccumulator(str(config.run_dir / "tensorboard"))
    before.Reload()
    assert {event.step for event in before.Scalars("train/loss")} == {1, 2}  # flushed at once
    run(config, resume=True)
    after = EventAccumulator(str(config.run_dir / "tensorboard"))
    after.Reload()
    assert {event.step for event in after.Scalars("train/loss")} == set(range(1, STEPS + 1))


@pytest.mark.parametrize("data", [b"", b"not a checkpoint", b"PK\x03\x04" + b"\0" * 100])
def test_a_damaged_checkpoint_is_one_line(tmp_path, tiny_directory, data):
    config = config_of(tmp_path, tiny_directory)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "trainer.pt").write_bytes(data)
    with pytest.raises(RunError, match=r"trainer\.pt is damaged .*; put a copy back, or begin a new run"):
        run(config, resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_is_under_way_is_not_run_a_second_time(tmp_path, tiny_directory, monkeypatch, resume):
    """Two processes would write the same weights under the same names."""
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = config_of(tmp_path, tiny_directory, tracker="none")
    lock = lock_run(config.run_dir)
    assert lock is not None
    with lock, pytest.raises(RunError, match=r"another process.* is running .*; wait for its end"):
        run(config, resume=resume)
    assert run(config, resume=False)[0]["completed"]  # the lock ended with its holder


def changed(config, **keys):
    return RunConfig(**{**config.to_record(), **keys})


def finished_run(tmp_path, tiny_directory, monkeypatch):
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)
    config = config_of(tmp_path, tiny_directory, tracker="none")
    run(config, resume=False)
    return config, {p: p.read_bytes() for p in config.run_dir.rglob("*.safetensors")}


def test_a_run_whose_trainer_state_is_gone_is_left_as_it_is(tmp_path, tiny_directory, monkeypatch):
    config, weights = finished_run(tmp_path, tiny_directory, monkeypatch)
    (config.run_dir / "trainer.pt").unlink()
    with pytest.raises(RunError, match=rf"has published v{STEPS}, and its trainer\.pt is gone"):
        run(config, resume=True)
    assert {p: p.read_bytes() for p in config.run_dir.rglob("*.safetensors")} == weights


def test_a_run_does_not_go_on_with_another_model(tmp_path, tiny_directory, monkeypatch):
    config, weights = finished_run(tmp_path, tiny_directory, monkeypatch)
    other = make_tiny_model(tmp_path / "other", hybrid=True, seed=0)
    with pytest.raises(RunError, match=r"can't go on with this model: .*config\.json has"):
        run(changed(config, model=str(other), steps=STEPS + 1), resume=True)
    assert {p: p.read_bytes() for p in config.run_dir.rglob("*.safetensors")} == weights


def test_the_summary_of_a_resumed_run_has_each_policy(tmp_path, tiny_directory, monkeypatch):
    config, _ = finished_run(tmp_path, tiny_directory, monkeypatch)
    other = changed(config, disjoint_prefix_sharing="scoped", steps=STEPS + 1)
    summary, _ = run(other, resume=True)
    assert summary["policy"] == f"{config.policy}; then {other.policy}"
    assert summary["policies"] == [asdict(config.policy), asdict(other.policy)]
