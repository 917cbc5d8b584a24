"""The device has finished before an update can change a byte: on SGLang's own updater, with a watched device."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from slime_backend.engine_plugin import device_fence, epoch

LOADS = ("disk", "distributed", "tensor", "ipc")
PATHS = (*(f"update_weights_from_{source}" for source in LOADS), "begin_weight_update")


class Device:
    """A torch device module that notes when it is waited for."""

    def __init__(self, log: list[str], broken: bool = False) -> None:
        self.log, self.broken = log, broken

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")
        self.log.append("waited")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order; the hooks' own counts start at 0, and one more listener follows theirs."""
    events: list[str] = []
    watched = epoch.WeightEpoch(lambda: "v0")
    watched.on_end(device_fence.on_epoch_end)
    watched.on_end(lambda scheduler, number: events.append("listener"))
    monkeypatch.setattr(epoch, "EPOCH", watched)
    monkeypatch.setattr(device_fence, "waits", 0)
    monkeypatch.setattr(device_fence, "failed", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Device(events))
    monkeypatch.setattr(weight_updater.torch.distributed, "barrier", lambda group=None: None)
    return events


def updater(log: list[str]) -> SchedulerWeightUpdaterManager:
    """SGLang's own, over a runner that notes the first byte."""

    def write(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        log.append("byte")
        return True, "Success"

    names = ("load_weights_from_distributed", "begin_weight_update", *PATHS)
    runner = SimpleNamespace(weight_updater=SimpleNamespace(**dict.fromkeys(names, write)))
    runner.weight_updater.receive_weights_from_distributed = lambda **kwargs: []
    worker = SimpleNamespace(
        model_runner=runner,
        weight_update_runners=lambda: [("target", runner)],
        deserialize_own_rank=lambda tensors: tensors,
    )
    found = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    found.tp_worker, found.draft_worker, found.metrics_collector = worker, None, None
    found.scheduler = SimpleNamespace(
        device="cpu", record_weight_version_change=lambda new_version: None, enable_overlap_mlx=False
    )
    found.tp_cpu_group = None
    found._session = None
    return found


def call(path: str, found: SchedulerWeightUpdaterManager, hooked: bool = True) -> Any:
    function = getattr(SchedulerWeightUpdaterManager, path)
    if hooked:
        targets = {
            target.rpartition(".")[2]: hook
            for target, _, hook in [
                *((update, "before", epoch._before_update) for update in epoch.UPDATES),
                *device_fence.functions(epoch.UPDATER),
            ]
        }
        function = _wrap_fn(function, targets[path], HookType.BEFORE)
    request = SimpleNamespace(
        model_path="", load_format=None, recapture_cuda_graph=False, weight_version=None, flush_cache=False, names=[]
    )
    request.dtypes = request.shapes = request.serialized_named_tensors = []
    request.group_name, request.selector = "g", "all"
    if path in ("update_weights_from_distributed", "update_weights_from_tensor"):
        found._session = weight_updater._WeightUpdateSession(selector="all")
    return function(found, request)


@pytest.mark.parametrize("path", PATHS)
def test_the_device_has_finished_before_the_listeners_and_the_first_byte(log: list[str], path: str) -> None:
    assert call(path, updater(log)).success
    assert log == (["waited", "byte"] if path == "begin_weight_update" else ["waited", "listener", "byte"])
    assert device_fence.waits == (path != "begin_weight_update")
    assert device_fence.failed == 0


@pytest.mark.parametrize("path", PATHS)
def test_sglang_alone_waits_for_nothing(log: list[str], path: str) -> None:
    assert call(path, updater(log), hooked=False).success
    assert log == ["byte"]


@pytest.mark.parametrize("path", PATHS)
def test_a_wait_that_fails_is_counted_and_ends_no_scheduler(
    log: list[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Device(log, broken=True))
    assert call(path, updater(log)).success
    assert "waited" not in log
    assert (device_fence.waits, device_fence.failed) == (0, 1)


def test_queued_results_that_are_computed_lazily_are_no_finished_device(log: list[str]) -> None:
    scheduler = SimpleNamespace(device="mps", enable_overlap_mlx=True, result_queue=[object()])
    device_fence.on_epoch_end(scheduler, 0)
    assert (log, device_fence.waits, device_fence.failed) == ([], 0, 1)


def test_a_listener_that_fails_does_not_reach_sglang(log: list[str]) -> None:
    def broken(scheduler: Any, number: int) -> None:
        log.append("broken")
        raise ValueError

    epoch.EPOCH._listeners.insert(1, broken)
    assert call("update_weights_from_disk", updater(log)).success
    assert log == ["waited", "broken", "listener", "byte"]
    assert epoch.EPOCH.number == 1


def test_the_wait_is_the_first_listener_of_the_process() -> None:
    assert epoch.EPOCH._listeners[0] is device_fence.on_epoch_end


def test_every_call_of_sglang_that_writes_weights_is_listened_to() -> None:
    """A new update in SGLang's updater would stand here. The other calls write no weights, or only once idle."""
    public = {
        name
        for name, _ in inspect.getmembers(SchedulerWeightUpdaterManager, inspect.isfunction)
        if not name.startswith("_")
    }
    writes = {name for name in public if "update" in name and "group" not in name and "after" not in name}
    assert writes - {"end_weight_update"} == set(PATHS)
