"""slime's updaters behind the transaction, on stubs of an updater, of Ray and of the process group, and fake engines.

The stub updates as slime 0.3.1 does: pause, flush, send, continue, on `rollout_engines`; beside them a colocated layout
has `distributed_rollout_engines`, which slime sends to and forgets to pause.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.slime_hooks.weights import updaters
from slime_backend.slime_hooks.weights.errors import EngineRejectedUpdate
from slime_backend.slime_hooks.weights.rank_link import link_of
from slime_backend.slime_hooks.weights.updaters import _put_behind_transaction, broadcast
from tests.slime_hooks.publishing import engines_and_publisher
from tests.slime_hooks.stub_ray import StubActor

pytestmark = pytest.mark.usefixtures("stub_ray")


class StubUpdater:
    """A colocated updater with `colocated` engines of those it is connected to; the others get broadcasts."""

    colocated = 1
    _is_distributed_src_rank = True
    _group_name = "slime"

    def __init__(self, args):
        self.args, self.weight_version = args, 0
        self.update_weight_metrics = {}
        self._model_update_groups = None

    def connect_rollout_engines(self, rollout_engines, rollout_engine_lock, engine_gpu_counts=None):
        self.rollout_engines = rollout_engines[: self.colocated]
        self.distributed_rollout_engines = rollout_engines[self.colocated :]
        self.use_distribute = bool(self.distributed_rollout_engines)
        self._ipc_engine = rollout_engines[0]
        if self.use_distribute:
            self._model_update_groups = "group of all"

    def update_weights(self):
        import ray

        self.weight_version += 1
        for control in ("pause_generation", "flush_cache"):
            ray.get([getattr(engine, control).remote() for engine in self.rollout_engines])
        ray.get([engine.post_process_weights.remote() for engine in self.rollout_engines])
        name = str(self.weight_version)
        ray.get(self._ipc_engine.update_weights_from_tensor.remote([name], load_format="x", weight_version=name))
        if self.use_distribute:
            ray.get(
                module.send(
                    "slime",
                    self._model_update_groups,
                    self.weight_version,
                    self.distributed_rollout_engines,
                    [(name, torch.zeros(1))],
                )
            )
        ray.get([engine.continue_generation.remote() for engine in self.rollout_engines])


module = SimpleNamespace(send=broadcast)


class OneRank:
    rank = 0

    def share(self, value):
        return value

    def gather(self, value):
        return [value]


@pytest.fixture
def connected(tmp_path, monkeypatch):
    """A job with two engines, one of them not colocated; (updater, actors, fakes, router, groups)."""
    groups = []

    def connect(args, name, engines, engine_gpu_counts):
        groups.append((len(engines), engine_gpu_counts))
        return f"group of {len(engines)}"

    slime_module: Any = ModuleType("slime.backends.megatron_utils.update_weight.update_weight_from_distributed")
    slime_module.connect_rollout_engines_from_distributed = connect
    parent: Any = ModuleType("slime.backends.megatron_utils.update_weight")
    parent.update_weight_from_distributed = slime_module
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, slime_module.__name__, slime_module)
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *args, **kwargs: done)
    monkeypatch.setattr(updaters, "give_up", groups.extend)

    updater_class = type("Updater", (StubUpdater,), {n: vars(StubUpdater)[n] for n in _WRAPPED})
    _put_behind_transaction(updater_class, "tensor")
    with engines_and_publisher(tmp_path / "unused") as (_, engines, router):
        args = SimpleNamespace(
            colocate=True,
            reef_run_dir=str(tmp_path / "reef"),
            reef_load_timeout=5.0,
            allow_kv_holder=[],
            verify_weights="auto",
            use_fault_tolerance=False,
            rollout_external=False,
            rollout_num_gpus_per_engine=1,
        )
        updater = updater_class(args)
        link: Any = link_of(updater)
        link.ranks = OneRank()
        actors = [StubActor(engine) for engine in engines]
        updater.connect_rollout_engines(actors, None, engine_gpu_counts=[1, 2])
        yield updater, actors, [engine.fake for engine in engines], router, groups
        if link_of(updater).publisher:
            link_of(updater).publisher.close()


_WRAPPED = ("connect_rollout_engines", "update_weights")


def test_an_engine_beside_the_colocated_ones_is_paused_flushed_and_resumed(connected):
    updater, _, fakes, router, _ = connected
    updater.update_weights()
    for fake in fakes:
        assert (fake.loaded, fake.label, fake.paused) == ("1", "1", False)
        assert {"/pause_generation", "/flush_cache", "/continue_generation"} <= set(fake.calls)
    assert len(router.workers) == 2
    assert updater.weight_version == 1
    assert updater.update_weight_metrics["reef/publication/flushes_verified"] == 2


def test_slime_alone_sends_to_it_unpaused(connected, monkeypatch):
    """The control: the same updater without us."""
    _, actors, _, _, _ = connected
    plain = StubUpdater(SimpleNamespace())
    plain.connect_rollout_engines(actors, None)
    monkeypatch.setattr(module, "send", lambda *args: [e.update_weights_from_distributed.remote() for e in args[3]])
    plain.update_weights()
    assert "pause_generation" in actors[0].calls
    assert actors[1].calls == ["update_weights_from_distributed"]


def test_controls_stay_with_the_transaction_and_the_rest_goes_through(connected):
    updater, actors, _, _, _ = connected
    updater.update_weights()
    assert actors[0].calls == ["post_process_weights"]
    assert actors[1].calls == []
    assert updater.rollout_engines == actors[:1]
    assert updater._ipc_engine is actors[0]


def test_a_group_is_made_anew_without_the_engine_that_failed_and_with_it_again_later(connected):
    updater, _, fakes, router, groups = connected
    fakes[1].faults["/update_weights_from_distributed"] = ["refuse"]
    updater.update_weights()
    assert router.workers == [fakes[0].url]
    assert updater.weight_version == 1  # two rounds of sending, one version
    updater.update_weights()
    assert len(router.workers) == 2
    assert updater.weight_version == 2
    assert groups == ["group of all", (1, [2])]
    assert [len(r["engines"]) for r in read_jsonl(link_of(updater).publisher._records.path)] == [2, 2]


def test_a_rejection_by_all_is_raised(connected):
    updater, _, fakes, _, _ = connected
    for fake in fakes:
        fake.faults["/update_weights_from_tensor"] = ["refuse"] * 3
        fake.faults["/update_weights_from_distributed"] = ["refuse"] * 3
    with pytest.raises(EngineRejectedUpdate, match="refused"):
        updater.update_weights()
    assert not any(fake.paused or fake.session_open for fake in fakes)
