"""What an engine is started with to have several tensor ranks on a CPU (engine_plugin/no_nccl/sitecustomize.py)."""

from __future__ import annotations

import os
from pathlib import Path

NO_NCCL = Path(__file__).parent / "engine_plugin" / "no_nccl"


def flags(ranks: int) -> tuple[str, ...]:
    return () if ranks == 1 else ("--tp-size", str(ranks))


def environment(ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    path = os.pathsep.join([str(NO_NCCL), *filter(None, [os.environ.get("PYTHONPATH")])])
    # SGLang gives each rank a NUMA node of its own unless it is told which cores to take.
    return {"PYTHONPATH": path, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(ranks))}
