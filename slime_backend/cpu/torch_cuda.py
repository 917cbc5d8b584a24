"""`install` replaces the names of torch.cuda that Megatron-core and slime's trainer use, for a process without a GPU.

Only megatron.py installs this, and only into a process of the CPU mode that imports Megatron-core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Functions that make tensors and are called with device="cuda" or pin_memory=True.
FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "as_tensor",
    "zeros_like",
    "empty_like",
    "ones_like",
    "full_like",
)


class _Nothing:
    """This stands in for a stream, an event or its context: CPU work is ordered without them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def install() -> None:
    """Replace the names. May be called again."""
    import torch
    import torch.utils._device as device_contexts

    if getattr(torch.cuda, "reef_slime_on_cpu", False):
        return
    torch.cuda.reef_slime_on_cpu = True  # type: ignore[attr-defined]
    # `with torch.device("meta")` finds the factories by identity in this cached set: fill it before they are wrapped,
    # or the context silently does nothing (torch 2.14, utils/_device.py).
    device_contexts._device_constructors()

    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.current_device = lambda: "cpu"
    cuda.set_device = _nothing
    cuda.synchronize = _nothing
    cuda.empty_cache = _nothing
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = cuda.current_stream = cuda.default_stream = _Nothing
    # Megatron-core asks whether the GPU is Blackwell or later before it allows TP or CP with more than one connection.
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=10, minor=0, name="cpu", total_memory=0, uuid="cpu"
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # there is nothing to pin memory for, and torch refuses without a driver
        return factory(*args, **kwargs)

    return make
