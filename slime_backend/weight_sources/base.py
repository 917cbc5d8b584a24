"""What a transport asks of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous CPU or device tensors under the names of the Hugging Face checkpoint; tied copies left out."""

    def save(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint. A directory that is already complete is left as it is."""
