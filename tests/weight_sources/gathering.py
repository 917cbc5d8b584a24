"""What it takes of memory to publish from ZeRO-3, on one of its ranks: counted by torch's allocator, and by the kernel.

transport    buckets are taken as a transport takes them, each released before the one after the next is gathered
save         a checkpoint is written
everything   the whole model is gathered first (control)
deepspeed    the same buckets by deepspeed.zero.GatheredParameters (peer)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from slime_backend.weight_sources.buckets import in_buckets, in_groups
from slime_backend.weight_sources.deepspeed_zero import DeepSpeedZeroSource
from tests.weight_sources.allocations import Allocations

How = Literal["transport", "save", "everything", "deepspeed"]
HOWS: tuple[How, ...] = get_args(How)


def measure(
    engine: Any, model: Any, template: Path, how: How, bucket_bytes: int, rank: int, folder: Path
) -> dict[str, int]:
    """Bytes at the peak, above what was there before: `allocated`, `resident`; beside them `bucket`, the largest one,
    and `whole`, the model. On all ranks together; resident memory is that of the first of two passes."""
    source = DeepSpeedZeroSource(engine, template, model=model, bucket_bytes=bucket_bytes)

    def work(name: str) -> None:
        if how == "deepspeed":
            _gather_by_deepspeed(model, bucket_bytes)
        elif rank:
            source.follow()
        else:
            with source.leading():
                _take(source, how, bucket_bytes, folder / name)

    resident = _peak_resident(lambda: work("first"))
    with Allocations() as seen:
        work("second")
    whole = sum(p.ds_numel * p.dtype.itemsize for p in model.parameters())
    return {
        "allocated": seen.peak_bytes,
        "resident": resident,
        "bucket": source.largest_bucket_bytes,
        "whole": whole,
    }


def _take(source: DeepSpeedZeroSource, how: How, bucket_bytes: int, directory: Path) -> None:
    if how == "transport":
        for bucket in in_buckets(source.named_tensors(), bucket_bytes):
            del bucket
    elif how == "save":
        source.save(directory)
    else:
        everything = list(source.named_tensors())
        del everything


def _gather_by_deepspeed(model: Any, bucket_bytes: int) -> None:
    import deepspeed

    for bucket in in_groups(model.parameters(), lambda p: p.ds_numel * p.dtype.itemsize, bucket_bytes):
        with deepspeed.zero.GatheredParameters(bucket):
            assert all(p.numel() == p.ds_numel for p in bucket)


def _peak_resident(work: Callable[[], None]) -> int:
    """How far this process's resident memory rose during `work`; the kernel keeps the peak."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
