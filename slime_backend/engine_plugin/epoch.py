"""The weight epoch of this scheduler process: a count of weight mutations, with the version name of each.

Changes no behaviour: it listens. In 0.5.23 to the four update calls (scheduler_components/weight_updater.py:149-289)
and to /update_weight_version (managers/scheduler.py:5630), which is a message from 0.5.19; before, schedulers hear of a
label through label_relay.py only. The count moves BEFORE the first byte can change, so an update that fails half-way is
an epoch of its own, and on a bare renaming as well, because writers that bypass SGLang (RDMA) announce nothing else. An
epoch bears the version name that was in force when it ended: a name which arrives after the weights, while nothing was
sampled, leaves an epoch without tokens in between.

Shared by the hooks that need it; they subscribe with `on_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_backend.engine_plugin import device_fence, generation, guard, label_relay, registry
from slime_backend.engine_plugin.names import IMPORTED, Sglang
from slime_backend.engine_plugin.registry import Plan

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
RENAME = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"

# Called with the scheduler and the epoch that ends, while its version name is still in force.
Listener = Callable[[Any, int], None]


class WeightEpoch:
    """Counts weight mutations. `current_version` names the version that the engine serves now."""

    def __init__(self, current_version: Callable[[], str]) -> None:
        self.number = 0
        self._current_version = current_version
        self._names: dict[int, str] = {}
        self._admissions = 0
        self._listeners: list[Listener] = []
        self._hooks: dict[Listener, str] = {}  # whose part a listener is

    def on_end(self, listener: Listener, hook: str = "kv_evidence") -> None:
        """Call `listener`, a part of `hook`, at the end of each epoch."""
        self._listeners.append(listener)
        self._hooks[listener] = hook

    def advance(self, scheduler: Any) -> None:
        """End the current epoch. A listener that fails leaves its part of the evidence as it was: the others are
        called, its hook reports the fault, and the controller refuses the update."""
        for listener in self._listeners:
            hook = self._hooks.get(listener, "kv_evidence")
            where = f"{listener.__module__} at the end of weight epoch {self.number}"
            guard.attempt(listener, scheduler, self.number, report=_reporter(hook, where), otherwise=None)
        self._names[self.number] = self._current_version()
        self.number += 1
        self._admissions = 0

    def version(self, epoch: int) -> str:
        """Version name of an epoch."""
        return self._names.get(epoch) or self._current_version()

    def name_if_known(self, epoch: int) -> str:
        """As `version`, of an epoch that may be older than any request, or none at all."""
        if epoch < 0:
            return "unwritten"
        if epoch == self.number:
            return self._current_version()
        return self._names.get(epoch) or f"epoch {epoch}"

    def forget_before(self, epoch: int) -> None:
        """Drop the names of older epochs, which nobody will ask for: a run may publish a hundred thousand times."""
        for older in [number for number in self._names if number < epoch]:
            del self._names[older]

    def next_order(self) -> int:
        """Place of an admission to prefill inside the current epoch, from 0."""
        order, self._admissions = self._admissions, self._admissions + 1
        return order


def _reporter(hook: str, where: str) -> guard.Report:
    return lambda error: registry.report_fault((hook,), where, error)


EPOCH = WeightEpoch(generation.served_version)
EPOCH.on_end(device_fence.on_epoch_end)  # the first listener: nothing may change before the device has finished


def plan(sglang: Sglang = IMPORTED) -> Plan:
    """Listen to weight mutations; every hook that needs the epoch adds this to its own plan."""
    functions: list[registry.HookFunction] = [(target, "before", _before_update) for target in UPDATES]
    functions += device_fence.functions(UPDATER, sglang)
    uses = (f"{UPDATER}.scheduler", *generation.LABEL_USES, *device_fence.USES)
    if generation.scheduler_learns_labels(sglang):
        functions.append((RENAME, "before", _before_rename))
    else:
        functions += label_relay.functions(sglang, _around_message)
        uses += label_relay.uses(sglang)
    return Plan(tuple(functions), uses)


def _before_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    EPOCH.advance(updater.scheduler)


def _before_rename(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    EPOCH.advance(scheduler)


_around_message = label_relay.around_message(EPOCH.advance)
