"""This module adapts Megatron-core 0.19.2 to a CPU; each change names the file and the text that need it.

Most of what Megatron-core asks of CUDA goes through a few names of torch.cuda, which torch_cuda.py implements;
`USES` lists which module needs which, and is asserted when that module is imported. Modules that compare the names of
tensor types are compiled with other names (`REWRITES`).
"""

from __future__ import annotations

import functools
import sys
import typing
from typing import Any

from slime_backend.cpu import source, torch_cuda
from slime_backend.import_hooks import on_import

# Megatron-core compares `tensor.type()` with these names; a CPU tensor's has no "cuda".
REWRITES: dict[str, dict[str, str]] = {
    module: {"'torch.cuda.": "'torch."}
    for module in (
        "megatron.core.optimizer.optimizer",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.optimizer.clip_grads",
    )
}

# Without Apex and Transformer Engine, Megatron-core asks torch's Adam for its step count. It has none before its first
# step, which is when a run loads a checkpoint.
REWRITES["megatron.core.optimizer.distrib_optimizer"] |= {
    "assert len(steps) == 1\n            step = steps[0]": "step = steps[0] if steps else 0.0",
}

# Module -> texts that need the names of torch_cuda.py.
USES: dict[str, tuple[str, ...]] = {
    "megatron.core.tensor_parallel.random": ("torch.cuda.get_rng_state()", "torch.cuda.manual_seed("),
    "megatron.core.tensor_parallel.mappings": ("device=torch.cuda.current_device()",),
    "megatron.core.distributed.param_and_grad_buffer": ("torch.cuda.current_stream()", 'device="cuda"'),
    "megatron.training.arguments": ("get_device_arch_version()",),
    "megatron.training.utils.common_utils": ("torch.cuda.get_device_properties(",),
}

# Optional packages of CUDA kernels, which Megatron-core then does without. flash_mla's library raises OSError without
# a driver, where only ImportError is tolerated; flashinfer costs each process 2.6 s of import and 170 MiB.
HIDDEN = ("flash_mla", "flashinfer")


def install() -> None:
    """Register all changes for the import of Megatron-core."""
    on_import("megatron.core", _prepare)
    on_import("megatron.core.tensor_parallel.random", _use_cpu_generator)
    on_import("megatron.core.optimizer.distrib_optimizer", _load_without_gradients)
    for module_name, replacements in REWRITES.items():
        source.rewrite(module_name, replacements)
    for module_name, texts in USES.items():
        on_import(module_name, _check(module_name, texts))
    if not hasattr(typing, "override"):  # Megatron-core 0.19 is written for Python 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    for package in HIDDEN:
        if package not in sys.modules:
            sys.modules[package] = None  # type: ignore[assignment]


def _prepare(module: Any) -> None:
    torch_cuda.install()


def _use_cpu_generator(module: Any) -> None:
    """Replace the setter, which would queue each state for a CUDA that never starts, and set nothing."""
    import torch

    source.require_in(module, ["def _get_cuda_rng_state(", "def _set_cuda_rng_state("])
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _load_without_gradients(module: Any) -> None:
    """In float32 the optimizer's main parameters are the model's own, which a load writes over in place."""
    import torch

    optimizer = module.DistributedOptimizer
    optimizer.load_state_dict = torch.no_grad()(optimizer.load_state_dict)


@functools.cache
def _check(module_name: str, texts: tuple[str, ...]):  # type: ignore[no-untyped-def]
    return lambda module: source.require_in(module, texts)
