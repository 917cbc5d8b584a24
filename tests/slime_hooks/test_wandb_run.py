"""One W&B run for all of slime's processes: a real offline run, slime's functions and Ray's actor as stand-ins."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.slime_hooks import wandb_run
from slime_backend.slime_hooks.weights import publication_rows
from tests.waiting import wait_until
from tests.wandb_files import has_ended, history, step_metrics

ARGS = SimpleNamespace(use_wandb=True, wandb_run_id=None)


class LocalRay:
    """An actor's calls run here, and `get` returns what they returned."""

    def __init__(self) -> None:
        self.actors: dict[str, object] = {}

    def remote(self, kind):
        def options(name, num_cpus):
            assert num_cpus == 0  # a job on a full cluster must not wait for it
            return SimpleNamespace(remote=functools.partial(self._start, name, kind))

        return SimpleNamespace(options=options)

    def _start(self, name, kind):
        made = kind()
        calls = {method: SimpleNamespace(remote=getattr(made, method)) for method in ("put", "take")}
        self.actors[name] = SimpleNamespace(**calls)
        return self.actors[name]

    def get_actor(self, name):
        return self.actors[name]

    def get(self, value, timeout):
        return value


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """slime's two modules in the driver, with a real offline run below `tmp_path`."""
    wandb = pytest.importorskip("wandb")
    ray = LocalRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(wandb_run, "_writer", None)
    monkeypatch.setattr(wandb_run, "_directory", None)
    monkeypatch.setattr(wandb_run, "TAKE_EVERY_S", 3600.0)  # the end alone must bring everything
    monkeypatch.delattr(wandb.util, "generate_id", raising=False)

    def primary(args):
        wandb.util.generate_id()
        wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
        args.wandb_run_id = wandb.run.id

    def secondary(args, role=None):
        raise AssertionError("a second run was opened")

    module: Any = SimpleNamespace(
        wandb=wandb,
        init_wandb_primary=primary,
        init_wandb_secondary=secondary,
        _init_wandb_common=lambda: wandb.define_metric("train/*", step_metric="train/step"),
    )
    tracking = SimpleNamespace(finish_tracking=lambda args: wandb.finish())
    wandb_run.one_writer(module)
    wandb_run.write_the_rest(tracking)
    args = SimpleNamespace(**vars(ARGS))
    module.init_wandb_primary(args)
    yield SimpleNamespace(module=module, tracking=tracking, args=args, wandb=wandb, root=tmp_path, ray=ray)
    wandb_run.close()
    wandb.finish()


def trainer(driver):
    """slime's wandb module in another process: W&B's functions are its own, and no run is open."""
    other = SimpleNamespace(util=driver.wandb.util, run=None, log=None, define_metric=None)
    module = SimpleNamespace(
        wandb=other,
        init_wandb_primary=lambda args: None,
        init_wandb_secondary=None,
        _init_wandb_common=lambda: other.define_metric("train/*", step_metric="train/step"),
    )
    wandb_run.one_writer(module)
    module.init_wandb_secondary(driver.args, role="actor")
    return other


def file_of(driver):
    """The run's file, once its end is in it: W&B's own process may write that a moment after `finish`."""
    [file] = driver.root.rglob("*.wandb")
    wait_until(lambda: has_ended(file), f"{file} holds the run's end")
    return file


def test_rows_of_two_processes_are_in_one_file_on_one_axis(driver):
    first, second = trainer(driver), trainer(driver)
    first.log({"train/loss": 1.0, "train/step": 0}, step=7, commit=False)
    second.log({"reef/x": 2.0, "rollout/step": 0})
    first.log({"train/loss": 3.0, "train/step": 1})
    driver.tracking.finish_tracking(driver.args)
    rows = history(file_of(driver))
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert [row.get("train/loss") or row.get("reef/x") for row in rows] == [1.0, 2.0, 3.0]
    defined = step_metrics(file_of(driver))
    assert (defined["reef/*"], defined["train/*"]) == ("rollout/step", "train/step")
    assert has_ended(file_of(driver))


def test_without_the_last_look_the_rows_are_lost(driver, monkeypatch):
    """The control of the test before."""
    trainer(driver).log({"train/loss": 1.0})
    monkeypatch.setattr(wandb_run, "close", lambda: None)
    driver.tracking.finish_tracking(driver.args)
    assert history(file_of(driver)) == []


def test_a_failed_job_keeps_what_it_logged_and_the_directory_is_known(driver):
    trainer(driver).log({"train/loss": 1.0})
    wandb_run.finish(driver.args)
    assert [row["train/loss"] for row in history(file_of(driver))] == [1.0]
    assert wandb_run.directory() == file_of(driver).parent
    assert has_ended(file_of(driver))


def test_a_lost_mailbox_ends_no_training_and_is_one_line(driver, caplog):
    process = trainer(driver)
    name = wandb_run.mailbox_name(driver.args.wandb_run_id)

    def gone(item):
        raise RuntimeError("the actor died")

    driver.ray.actors[name].put = SimpleNamespace(remote=gone)
    process.log({"x": 1})
    process.log({"x": 2})
    assert [r.getMessage() for r in caplog.records] == [
        "W&B: rows don't reach the driver: RuntimeError: the actor died"
    ]


def test_generate_id_is_put_back_only_where_it_is_missing():
    def own():
        return "slime's"

    wandb = SimpleNamespace(util=SimpleNamespace(generate_id=own))
    wandb_run.give_generate_id(wandb)
    assert wandb.util.generate_id is own
    bare = SimpleNamespace(util=SimpleNamespace())
    wandb_run.give_generate_id(bare)
    made = {bare.util.generate_id() for _ in range(50)}
    assert len(made) == 50
    assert all(len(one) == 8 and one.isalnum() for one in made)
    assert len(bare.util.generate_id(12)) == 12


class Trainer:
    """slime's MegatronTrainRayActor, as far as a publication's row needs it."""

    def __init__(self):
        self.args = SimpleNamespace(debug_train_only=False, debug_rollout_only=False)
        self.weight_updater = SimpleNamespace(update_weight_metrics={})

    def init(self, args, role):
        return 5  # resumed

    def train(self, rollout_id, data):
        return None

    def update_weights(self):
        self.weight_updater.update_weight_metrics |= {"reef/publication/wall_ms": 1.0, "perf/bytes": 2.0}


@pytest.mark.parametrize(("main_rank", "given", "logged"), [(True, None, [5, 6]), (True, 0, [0, 6]), (False, None, [])])
def test_a_publication_is_a_row_at_once_of_the_rank_that_logs(monkeypatch, main_rank, given, logged):
    class Actor(Trainer):
        pass

    rows = []
    monkeypatch.setattr(
        publication_rows, "log_publication", lambda args, figures, rollout: rows.append((rollout, figures))
    )
    publication_rows._in_trainer(SimpleNamespace(MegatronTrainRayActor=Actor, is_megatron_main_rank=lambda: main_rank))
    actor = Actor()
    actor.args.start_rollout_id = given
    assert actor.init(None, "actor") == 5
    actor.update_weights()
    actor.train(5, None)
    actor.update_weights()
    assert rows == [(rollout, {"reef/publication/wall_ms": 1.0}) for rollout in logged]
    assert actor.weight_updater.update_weight_metrics == {"perf/bytes": 2.0}  # slime's own stays for its step


def test_a_released_trainer_s_publications_are_logged_by_the_driver(monkeypatch):
    class Group:
        args = SimpleNamespace(start_rollout_id=3)

        def async_train(self, rollout_id, data):
            return []

    rows = []
    monkeypatch.setattr(publication_rows, "log_publication", lambda args, figures, rollout: rows.append(rollout))
    publication_rows._in_driver(SimpleNamespace(RayTrainGroup=Group))
    group = Group()
    publication_rows.log_from_driver(group, {})
    group.async_train(3, None)
    publication_rows.log_from_driver(group, {})
    assert rows == [3, 4]
