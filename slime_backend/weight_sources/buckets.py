"""Groups whose size is bounded, so that what lies in memory or on the wire at once is too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

BUCKET_BYTES = 256 << 20


def in_groups(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Group items in order so that each group's size is at most `most`, or it is a single larger item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group named tensors so that each bucket has at most `bucket_bytes`, or a single larger tensor."""
    return in_groups(tensors, lambda named: named[1].nbytes, bucket_bytes)
