"""Faults of a real engine, for jobs whose PYTHONPATH names this directory: it reaches SGLang's own processes too.

REEF_FAULT_REJECT=DIR    one engine, the first to reach it, rejects every update by broadcast from its second on;
                         the others don't. DIR/rejecting is made when it does so
REEF_FAULT_KILL=DIR      one engine is killed with the first request that it gets after its second update: the server
                         and its scheduler, by SIGKILL. DIR/killed is made before
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

from slime_backend.import_hooks import on_import

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
SCHEDULER = "sglang.srt.managers.scheduler"


def first(marker: Path) -> bool:
    """Whether this process is the first to make `marker`."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def reject_updates(module: ModuleType) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    manager = module.SchedulerWeightUpdaterManager
    receive = manager.update_weights_from_distributed
    marker = Path(os.environ["REEF_FAULT_REJECT"]) / "rejecting"
    state = {"taken": 0, "chosen": False}

    def update_weights_from_distributed(self, recv_req):
        state["taken"] += 1
        if state["taken"] == 2:
            state["chosen"] = first(marker)
        if state["chosen"]:
            return UpdateWeightsFromDistributedReqOutput(success=False, message="a fault that the test put in")
        return receive(self, recv_req)

    manager.update_weights_from_distributed = update_weights_from_distributed


updates = 0  # that this engine has taken, each in one bucket


def count_updates(module: ModuleType) -> None:
    manager = module.SchedulerWeightUpdaterManager
    receive = manager.update_weights_from_distributed

    def update_weights_from_distributed(self, recv_req):
        global updates
        updates += 1
        return receive(self, recv_req)

    manager.update_weights_from_distributed = update_weights_from_distributed


def kill_at_a_request(module: ModuleType) -> None:
    handle = module.Scheduler.handle_generate_request

    def handle_generate_request(self, recv_req):
        if updates == 2 and first(Path(os.environ["REEF_FAULT_KILL"]) / "killed"):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return handle(self, recv_req)

    module.Scheduler.handle_generate_request = handle_generate_request


if os.environ.get("REEF_FAULT_REJECT"):
    on_import(UPDATER, reject_updates)
if os.environ.get("REEF_FAULT_KILL"):
    on_import(UPDATER, count_updates)
    on_import(SCHEDULER, kill_at_a_request)
