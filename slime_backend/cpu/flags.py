"""The flags of slime, Megatron-core and SGLang without which nothing runs on a CPU.

A job's own flags come first; what is missing is added, and printed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

# Flag and its values (none for a switch), and why.
CPU_FLAGS: tuple[tuple[str, ...], ...] = (
    # SGLang: the Hugging Face model code runs without CUDA kernels.
    ("--sglang-device", "cpu"),
    ("--sglang-attention-backend", "torch_native"),
    ("--sglang-model-impl", "transformers"),
    ("--sglang-disable-overlap-schedule",),
    ("--sglang-mem-fraction-static", "0.2"),  # of all memory; trainer and engines share it
    ("--sglang-max-total-tokens", "65536"),
    ("--sglang-sleep-on-idle",),  # an idle scheduler would spin on a core that the trainer needs
    ("--sglang-dtype", "float32"),  # as the trainer's, see precision.py
    ("--router-prometheus-host", "127.0.0.1"),
    # Megatron-core: no Transformer Engine, no fused CUDA kernels.
    ("--transformer-impl", "local"),
    ("--spec", "slime_backend.cpu.layer_spec", "get_spec"),
    ("--use-cpu-initialization",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--attention-dropout", "0"),
    ("--hidden-dropout", "0"),
    # slime: handing memory back needs CUDA's virtual memory.
    ("--no-offload-train",),
    ("--no-offload-rollout",),
)


def missing(argv: Sequence[str]) -> list[str]:
    """The flags of CPU_FLAGS, with their values, that `argv` doesn't give itself."""
    given = {argument.partition("=")[0] for argument in argv}
    if {"--bf16", "--fp16"} & given:
        given.add("--sglang-dtype")  # the job has chosen a precision
    return [word for flag in CPU_FLAGS if flag[0] not in given for word in flag]
