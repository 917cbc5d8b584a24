"""Whether a checkpoint on disk holds exactly what a source would write."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slime_backend.weight_sources.base import WeightSource
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit, read_checkpoint


def why_other_content(directory: Path, source: WeightSource) -> str | None:
    """Why the directory doesn't hold the source's weights; None if it does. Reads all of both, tensor by tensor."""
    import torch

    try:
        found = read_checkpoint(directory)
    except CheckpointUnfit as error:
        return str(error)
    left = set(found.tensors)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in source.named_tensors():
            if name not in left:
                return f"it doesn't hold {name}"
            left.discard(name)
            file = found.tensors[name].file
            assert file is not None
            if file not in opened:
                opened[file] = stack.enter_context(_open(file))
            there = opened[file].get_tensor(name)
            here = tensor.detach().cpu()
            if there.dtype != here.dtype or there.shape != here.shape:
                return f"its {name} is {_kind(there)}, and {_kind(here)} is to be published"
            # Bytes, since a NaN doesn't equal itself.
            if not torch.equal(_bytes(there), _bytes(here)):
                return f"its {name} has other values than the weights that are to be published"
    return f"it holds {min(left)}, which isn't published" if left else None


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(file), "pt")


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
