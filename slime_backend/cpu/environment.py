"""`apply` sets the variables of a process that runs slime on a CPU.

What the user has set stays, except that the GPUs are hidden.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

DEFAULTS = {
    "SLIME_HOST_IP": "127.0.0.1",  # slime would offer the engines on an outside address
    "OMP_NUM_THREADS": "1",  # trainer and engines share the cores
    "TORCHDYNAMO_DISABLE": "1",  # Megatron-core's fusers would compile for 23 s in the first step
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's GPUs are logical here: it must not show them to an actor, nor hide them from one that asks for none.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def apply() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def unhidden_gpus() -> Iterator[None]:
    """Unset CUDA_VISIBLE_DEVICES in the block: a Ray that starts would refuse more logical GPUs than it names.

    Ray's workers inherit the environment of the start; `apply` hides the GPUs again in each of them.
    """
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
