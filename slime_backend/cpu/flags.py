"""`cpu_flags` returns the flags of slime, Megatron-core and SGLang that a CPU needs in addition to the job's.

argparse takes the last of two, so flags after the job's own win: a launch script for GPUs keeps its flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_backend.errors import ReefError

# Flag and its values; none of them has another value that works without a GPU.
NEEDED: tuple[tuple[str, ...], ...] = (
    # SGLang: the Hugging Face model code runs without CUDA kernels.
    ("--sglang-device", "cpu"),
    ("--sglang-attention-backend", "torch_native"),
    ("--sglang-model-impl", "transformers"),
    ("--sglang-disable-overlap-schedule",),
    # Megatron-core: no Transformer Engine, no fused CUDA kernels.
    ("--transformer-impl", "local"),
    ("--use-cpu-initialization",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--attention-dropout", "0"),  # layer_spec.py has none
    # slime: handing memory back needs CUDA's virtual memory.
    ("--no-offload-train",),
    ("--no-offload-rollout",),
)

# These apply unless the job sets them.
DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--spec", "slime_backend.cpu.layer_spec", "get_spec"),
    ("--hidden-dropout", "0"),
    ("--sglang-dtype", "float32"),  # as the trainer's, see precision.py
    ("--sglang-mem-fraction-static", "0.2"),  # a share of all memory, for trainer and engines together
    ("--sglang-max-total-tokens", "65536"),
    ("--sglang-sleep-on-idle",),  # an idle scheduler would spin on a core that the trainer needs
    ("--router-prometheus-host", "127.0.0.1"),
)

# slime reads it after every other flag, so no later flag can override it.
REFUSED = ("--offload",)
PRECISIONS = {"--bf16", "--fp16"}


class GpuFlagError(ReefError, ValueError):
    """The job has a flag that can't be overruled and can't work on a CPU."""


def cpu_flags(argv: Sequence[str]) -> list[str]:
    """Return what to append to the job's flags `argv`.

    Raises GpuFlagError.
    """
    given = {argument.partition("=")[0] for argument in argv}
    refused = [flag for flag in REFUSED if flag in given]
    if refused:
        raise GpuFlagError(f"{' and '.join(refused)} can't work on a CPU; remove it from the job's flags")
    if PRECISIONS & given:
        given.add("--sglang-dtype")  # the job has chosen a precision
    missing = [flag for flag in DEFAULTS if flag[0] not in given]
    return [word for flag in (*NEEDED, *missing) for word in flag]
