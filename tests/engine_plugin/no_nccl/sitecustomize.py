"""Keeps SGLang's tensor- and pipeline-parallel groups from asking for NCCL, so that both run on a CPU with gloo.

For an engine whose PYTHONPATH names this directory: it reaches every process that SGLang starts (SGLang 0.5.23,
distributed/parallel_state.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from slime_backend.post_import import on_import


def without_nccl(module: ModuleType) -> None:
    make = module.init_model_parallel_group

    def make_group(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})

    module.init_model_parallel_group = make_group


on_import("sglang.srt.distributed.parallel_state", without_nccl)
