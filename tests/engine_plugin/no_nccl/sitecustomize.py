"""Lets SGLang run with several tensor or pipeline ranks on a CPU: on the path of an engine's processes, nowhere else.

SGLang 0.5.23 asks for NCCL communicators on a CPU too (distributed/parallel_state.py, init_model_parallel_group);
without them its groups serve with gloo. Faults that a test may ask for:

    FAILING_TENSOR_RANK=1   its loads from disk fail while the file named by FAILING_WHILE exists
    BLIND_TENSOR_RANK=1     it starts without our plugin, as on a node where that isn't installed
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from slime_backend.import_hooks import on_import


def _without_nccl(module: Any) -> None:
    make = module.init_model_parallel_group

    def make_without_nccl(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})

    module.init_model_parallel_group = make_without_nccl


def _with_a_failing_rank(module: Any) -> None:
    load = module.WeightUpdater.update_weights_from_disk

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        failing = self.tp_rank == int(os.environ["FAILING_TENSOR_RANK"])
        if failing and Path(os.environ["FAILING_WHILE"]).exists():
            return False, "no such directory on this node"
        return load(self, *args, **kwargs)

    module.WeightUpdater.update_weights_from_disk = update


def _with_a_blind_rank(module: Any) -> None:
    load = module.load_plugins

    def load_unless_blind() -> None:
        # The first call of run_scheduler_process, which knows its rank.
        if sys._getframe(1).f_locals.get("tp_rank") == int(os.environ["BLIND_TENSOR_RANK"]):
            os.environ.pop("REEF_SLIME_HOOKS", None)
        load()

    module.load_plugins = load_unless_blind


on_import("sglang.srt.distributed.parallel_state", _without_nccl)
if os.environ.get("FAILING_TENSOR_RANK"):
    on_import("sglang.srt.model_executor.model_runner_components.weight_updater", _with_a_failing_rank)
if os.environ.get("BLIND_TENSOR_RANK"):
    on_import("sglang.srt.managers.scheduler", _with_a_blind_rank)
