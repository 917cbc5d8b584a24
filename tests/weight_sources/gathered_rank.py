"""Ranks of a source over made pieces: rank r has the rows r of every tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime_backend.weight_sources.buckets import in_buckets
from slime_backend.weight_sources.gathered import GatheredSource, Part
from tests.weight_sources.allocations import Allocations

ROWS, COLUMNS, TENSORS = 64, 1024, 12
TENSOR_BYTES = 2 * ROWS * COLUMNS * 4
BUCKET_BYTES = 3 * TENSOR_BYTES


class MadeSource(GatheredSource):
    def __init__(self, rank: int, template: Path) -> None:
        pieces = {f"t{i}": torch.full((ROWS, COLUMNS), float(10 * i + rank)) for i in range(TENSORS)}
        parts = [
            Part(name, (2 * ROWS, COLUMNS), torch.float32, partial(self._collect, piece, None))
            for name, piece in pieces.items()
        ]
        super().__init__(parts, template, ranks=(0, 1), bucket_bytes=BUCKET_BYTES)


def right(name: str, tensor: torch.Tensor) -> bool:
    first = 10.0 * int(name[1:])
    return bool((tensor[:ROWS] == first).all() and (tensor[ROWS:] == first + 1).all())


def passes(rank: int, folder: Path) -> dict[str, Any]:
    """Whole and abandoned passes, two at once, and one outside of `leading`."""
    source = MadeSource(rank, folder)
    if rank:
        for _ in range(3):
            source.follow()
        return {}
    with source.leading():
        whole = {name: right(name, tensor) for name, tensor in source.named_tensors()}
    with source.leading():
        left = next(iter(source.named_tensors()))[0]  # and the rest isn't asked for
        one, other = source.named_tensors(), source.named_tensors()
        together = [right(*next(one)) and right(*next(other)) for _ in range(TENSORS)]
    with source.leading():
        pass
    try:
        next(source.named_tensors())
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"whole": whole, "left": left, "together": together, "refused": refused}


def leader_fails(rank: int, folder: Path) -> dict[str, Any]:
    """An error in the middle of a publication: the follower is told, and the next one works."""
    source = MadeSource(rank, folder)
    if rank:
        started = time.monotonic()
        source.follow()
        ended = time.monotonic() - started
        source.follow()
        return {"ended": ended}
    try:
        with source.leading():
            next(source.named_tensors())
            raise ConnectionError("the engine is gone")
    except ConnectionError:
        pass
    with source.leading():
        return {"after": all(right(name, tensor) for name, tensor in source.named_tensors())}


def memory(rank: int, folder: Path, *, everything: bool) -> dict[str, Any]:
    """Bytes allocated at the most while a transport's buckets are taken, or while all are kept."""
    source = MadeSource(rank, folder)
    with Allocations() as seen:
        if rank:
            source.follow()
        else:
            with source.leading():
                if everything:
                    _kept = list(source.named_tensors())
                    del _kept
                else:
                    for bucket in in_buckets(source.named_tensors(), BUCKET_BYTES):
                        assert all(right(name, tensor) for name, tensor in bucket)
                        del bucket
    return {"peak": seen.peak_bytes, "bucket": source.largest_bucket_bytes}


CASES: dict[str, Callable[[int, Path], dict[str, Any]]] = {
    "passes": passes,
    "leader_fails": leader_fails,
    "transport": partial(memory, everything=False),
    "everything": partial(memory, everything=True),
}


def run(rank: int, folder: Path, *, case: str) -> dict[str, Any]:
    return CASES[case](rank, folder)
