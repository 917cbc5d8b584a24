"""Waits for the device before the weights can change, so that no batch in flight computes with half of an update.

An in-place pause returns at once and leaves the batch that was launched last to the device (SGLang 0.5.23,
managers/scheduler.py, `pause_generation`), on a stream of its own, while an update copies weights on another. No update
waits for it: the one from disk does by accident, in `torch.cuda.empty_cache()`, those from a group, from tensors and by
IPC don't (scheduler_components/weight_updater.py, model_runner_components/weight_updater.py). The batch's result stays
in the scheduler's queue until the resume, whose loop expects it there, so the queue can't be drained; what counts is
that the device has finished. Microseconds where it is idle, nothing on a CPU.

Runs at the end of each weight epoch, before every other listener, and before `begin_weight_update`, which unpacks
quantized weights in place and opens an update whose bytes SGLang may never see (RDMA). A wait that fails is counted,
and the controller refuses the update.
"""

from __future__ import annotations

import logging
from typing import Any

from slime_backend.engine_plugin import registry
from slime_backend.engine_plugin.generation import SCHEDULER
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang

log = logging.getLogger(__name__)

BEGIN = "begin_weight_update"  # from 0.5.21
USES: tuple[Need, ...] = (f"{SCHEDULER}.device", f"{SCHEDULER}.result_queue")

waits = 0  # epochs that began after a wait
failed = 0


def functions(updater: str, sglang: Sglang = IMPORTED) -> list[registry.HookFunction]:
    """What to attach to SGLang's class `updater`, next to the ends of epochs."""
    target = f"{updater}.{BEGIN}"
    return [(target, "before", _before_begin)] if sglang.has(target) else []


def on_epoch_end(scheduler: Any, ending: int) -> None:
    global waits
    if _wait(scheduler):
        waits += 1


def _before_begin(updater: Any, *args: Any, **kwargs: Any) -> None:
    _wait(updater.scheduler)


def _wait(scheduler: Any) -> bool:
    """Wait for all work of the scheduler's device; whether that was possible."""
    global failed
    try:
        if getattr(scheduler, "enable_overlap_mlx", False) and scheduler.result_queue:
            raise RuntimeError("MLX computes the queued results lazily, by the weights of that later moment")
        device_module(scheduler).synchronize()
    except Exception:  # SGLang's scheduler must not end by it; the count tells the controller
        log.exception("reef-slime: the device could not be waited for before an update of weights")
        failed += 1
        return False
    return True


def device_module(scheduler: Any) -> Any:
    """torch.cuda, torch.cpu, ...: of the device on which the scheduler's model runs."""
    import torch

    return torch.get_device_module(scheduler.device)
