"""What a transport asks of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_backend.weight_sources.checkpoint_check import Checkpoint, TensorHeader

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous CPU or device tensors under the names of the Hugging Face checkpoint; tied copies left out."""

    def save(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint. A directory that is already complete is left as it is."""


def headers_of(source: Any) -> Checkpoint | None:
    """Names, shapes and dtypes of what `source` publishes, without gathering anything; None where it has no `shapes`.

    `shapes()`: name -> (shape, torch dtype) of every tensor.
    """
    shapes = getattr(source, "shapes", None)
    if shapes is None:
        return None
    tensors = {
        name: TensorHeader(tuple(shape), SAFETENSORS_DTYPES.get(str(dtype), str(dtype)))
        for name, (shape, dtype) in shapes().items()
    }
    return Checkpoint(f"the trainer's {type(source).__name__}", tensors)


# torch's names -> safetensors'.
SAFETENSORS_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
