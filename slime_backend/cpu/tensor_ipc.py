"""This passes tensors from the trainer's process to the engine's in the colocated layout without CUDA's handles.

Both changes are for modules of the trainer only: what the engine receives is an ordinary tensor in shared memory.
"""

from __future__ import annotations

from typing import Any

from slime_backend.cpu import source
from slime_backend.import_hooks import on_import


def install() -> None:
    on_import("sglang.srt.utils.patch_torch", _keep_reductions)
    on_import("slime.backends.megatron_utils.sglang", _share_by_file)


def _keep_reductions(module: Any) -> None:
    """Skip SGLang's change to CUDA handles, which CPU tensors don't have (0.5.23, utils/patch_torch.py:74,103)."""
    source.require_in(module, ["def monkey_patch_torch_reductions("])
    module.monkey_patch_torch_reductions = lambda: None


def _share_by_file(module: Any) -> None:
    """Share tensors by file, since the trainer and the engine are unrelated processes.

    File descriptors pass only between processes with one authentication key.
    """
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
