"""This package runs slime and Megatron-core on a CPU, to debug a job without a GPU (docs/slime/cpu.md).

    SLIME_ACCELERATOR=cpu python -m slime_backend.slime_hooks.train ...

Everything here is inactive unless that variable, slime's own, is `cpu`; a machine with GPUs is never touched. Nothing
is edited on disk: what a CPU needs is registered by slime's own API or changed right after a module's import, and each
change asserts the source that it was written for (`source.py`).

    file            what a CPU needs
    environment.py  variables of the process
    flags.py        flags of slime, Megatron-core and SGLang that have no other value on a CPU
    accelerator.py  slime's accelerator registry
    megatron.py     Megatron-core: names of torch.cuda that it calls, tensor types that it compares
    torch_cuda.py   what those names of torch.cuda do on a CPU
    precision.py    float32 unless the job asks for less
    loopback.py     every address of the job
    layer_spec.py   attention over packed sequences, without Transformer Engine
    tensor_ipc.py   tensors between the trainer's and the engine's processes (colocated layout)
    tiny.py         a tiny checkpoint, its tokenizer, prompts, and the Megatron-core flags that describe it
"""

from __future__ import annotations

import os

VARIABLE = "SLIME_ACCELERATOR"


def requested() -> bool:
    """Return whether this process is to run slime on a CPU."""
    return os.environ.get(VARIABLE, "").strip().lower() == "cpu"


def install() -> None:
    """Prepare this process; nothing of slime, Megatron-core or torch is imported yet. May be called again."""
    from slime_backend.cpu import accelerator, environment, loopback, megatron, precision, tensor_ipc

    environment.apply()
    accelerator.install()
    megatron.install()
    precision.install()
    loopback.install()
    tensor_ipc.install()
