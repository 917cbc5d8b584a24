"""Faults of a real engine, for jobs whose PYTHONPATH names this directory: it reaches SGLang's own processes too.

REEF_FAULT_REJECT=DIR    one engine, the first to reach it, rejects every update by broadcast from its second on;
                         the others don't. DIR/rejecting is made when it does so
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from slime_backend.post_import import on_import

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"


def reject_updates(module: ModuleType) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    manager = module.SchedulerWeightUpdaterManager
    receive = manager.update_weights_from_distributed
    marker = Path(os.environ["REEF_FAULT_REJECT"]) / "rejecting"
    state = {"taken": 0, "chosen": False}

    def update_weights_from_distributed(self, recv_req):
        state["taken"] += 1
        if state["taken"] == 2:
            try:
                marker.touch(exist_ok=False)
                state["chosen"] = True
            except FileExistsError:
                pass
        if state["chosen"]:
            return UpdateWeightsFromDistributedReqOutput(success=False, message="a fault that the test put in")
        return receive(self, recv_req)

    manager.update_weights_from_distributed = update_weights_from_distributed


if os.environ.get("REEF_FAULT_REJECT"):
    on_import(UPDATER, reject_updates)
