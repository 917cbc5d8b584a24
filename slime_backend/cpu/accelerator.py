"""`register` adds `cpu` to slime's accelerator registry, by its public API (slime 0.3.1, slime/utils/accelerator)."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from slime_backend.import_hooks import on_import


def install() -> None:
    on_import("slime.utils.accelerator", register)


def register(module: ModuleType) -> None:
    """Register the accelerator in `module`, slime.utils.accelerator."""
    module.register_accelerator(
        "cpu",
        lambda: _accelerator_class()(),
        is_available=lambda: True,
        communication_backends=("gloo",),
    )


class _Stream:
    """A CPU's stream has nothing to wait for: work is done when it is issued."""

    def synchronize(self) -> None:
        return None


def _accelerator_class() -> type:
    import psutil
    import torch
    from slime.utils.accelerator.base import Accelerator

    class CpuAccelerator(Accelerator):
        """This accelerator has one device, `cpu`, with gloo for everything that would be NCCL."""

        name = "cpu"
        device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self) -> bool:
            return True

        def device(self, index: Any = None) -> torch.device:
            return torch.device("cpu")

        def device_name(self, index: Any = None) -> str:
            return "cpu"

        def set_device(self, index: Any) -> None:
            return None

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: Any = None) -> None:
            return None

        def current_stream(self, device: Any = None) -> _Stream:
            return _Stream()

        def default_stream(self, device: Any = None) -> _Stream:
            return _Stream()

        def stream(self, stream: Any) -> Any:
            return contextlib.nullcontext()

        def empty_cache(self) -> None:
            return None

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            memory = psutil.virtual_memory()
            return memory.available, memory.total

        def memory_allocated(self, device: Any = None) -> int:
            return 0

        def memory_reserved(self, device: Any = None) -> int:
            return 0

        def distributed_device_id(self, index: Any = None) -> None:
            return None  # gloo groups are not bound to a device

        def autocast(self, *args: Any, **kwargs: Any) -> Any:
            return torch.autocast("cpu", *args, **kwargs)

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def resolve_visible_device_id(self, physical_device_id: Any) -> int:
            # A CPU engine of SGLang takes `base_gpu_id` for a NUMA node (0.5.23, numa_utils.py:477).
            return 0

    return CpuAccelerator
