"""Measures which weight epoch wrote each KV slot that a request's tokens were sampled from.

`kv_spans` reports what follows from the order of events: a request computes its context itself, and a cached prefix is
of the current epoch. This hook stamps each slot with the epoch at every forward pass that writes it, one int32 per
slot, and reads the stamps of a request's slots when it gives them back, finished or retracted. A prefix of older
weights, KV that was kept where it is said to be computed again, or a fault of the cache shows in the request's own
answer, in any precision.

Stamping costs one kernel per pool and forward pass, in the stream of the pass, and never waits for the device. Reading
copies one number per position, once for all requests that ended in a step, in the stream that reads back results; what
a retract takes back is read before the next pass can write over it.

Works with SGLang 0.5.15.post1 to 0.5.23 (0.5.23: model_executor/model_runner.py:1813, ModelRunner.forward;
mem_cache/common.py:400, release_kv_cache). Sliding-window layers have slots of their own, found by the allocator's
mapping; a slot that has left the window isn't looked at. States of linear-attention layers have no slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import epoch, generation, kv_spans, registry, tensor_ranks
from slime_backend.engine_plugin.epoch import EPOCH
from slime_backend.engine_plugin.generation import holds_kv
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.pools import ROWS, SLOTS, TREE
from slime_backend.engine_plugin.registry import Plan
from slime_backend.engine_plugin.trace import UNWRITTEN, EpochSpan, RequestTrace

HOOK = "kv_stamps"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
FORWARD = f"{RUNNER}.forward"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
USES: tuple[Need, ...] = (
    f"{RUNNER}.is_draft_worker",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.out_cache_loc",
    *(f"{SLOTS}.{name}" for name in ("size", "page_size", "device")),
    f"{ROWS}.req_to_token",
    "sglang.srt.mem_cache.registry.TreeCacheBuildContext.params",
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams.token_to_kv_pool_allocator",
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams.req_to_token_pool",
    *generation.ROW_USES,
    *generation.KV_USES,
)


class SlotStamps:
    """The epoch that wrote each slot of a pool last, and of its sliding-window twin where there is one.

    Tensors on the pool's device: `full` (slots,) int32, `window` (window slots,) int32, `mapping` (slots,) int64.
    """

    def __init__(self, slots: int, device: Any, mapping: Any = None, window_slots: int = 0) -> None:
        import torch

        # One more than any slot: whatever lies outside of the pool is stamped there, since an index out of range would
        # end the process on a GPU.
        self.full = torch.full((slots + 1,), UNWRITTEN, dtype=torch.int32, device=device)
        self.mapping = mapping
        self.window = None
        if mapping is not None:
            self.window = torch.full((window_slots + 1,), UNWRITTEN, dtype=torch.int32, device=device)

    def write(self, slots: Any, epoch: int) -> None:
        """Stamp `slots`, an index tensor on the device. Launches kernels and waits for none."""
        import torch

        slots = slots.to(torch.int64)
        if self.window is not None:
            self.window.index_fill_(0, self.mapping[slots].clamp(0, len(self.window) - 1), epoch)
        self.full.index_fill_(0, slots.clamp(0, len(self.full) - 1), epoch)

    def read(self, rows: list[Any]) -> list[Any]:
        """The oldest epoch that wrote each of the slots in each row: one int32 tensor on the CPU for each. Waits."""
        import torch

        slots = torch.cat(rows).to(torch.int64)
        epochs = self.full[slots.clamp(0, len(self.full) - 1)]
        if self.window is not None:
            there = self.mapping[slots]
            window = self.window[there.clamp(0, len(self.window) - 1)]
            epochs = torch.where(there > 0, torch.minimum(epochs, window), epochs)
        return list(epochs.cpu().split([len(row) for row in rows]))


@dataclass(slots=True)
class Reading:
    """Slots that a request gave back and whose stamps haven't been read yet."""

    trace: RequestTrace
    admission: int
    row: Any


_stamps: SlotStamps | None = None
_rows: Any = None  # SGLang's ReqToTokenPool: which slots a request holds
_pending: list[Reading] = []


def install() -> str:
    status = registry.install(HOOK, plan(IMPORTED))
    if status == wire.ACTIVE:
        kv_spans.BEFORE_REPORT.append(settle)
    return status


def plan(sglang: Sglang) -> Plan:
    functions: tuple[registry.HookFunction, ...] = (
        (TREE, "after", _after_tree),
        (FORWARD, "before", _before_forward),
        (RELEASE, "before", _before_release),
    )
    return epoch.plan(sglang) + Plan(functions, USES, kv_spans.plan(sglang).instead)


def settle() -> None:
    """Read all stamps that are waited for."""
    if not _pending or _stamps is None:
        return
    pending = list(_pending)
    _pending.clear()
    for reading, epochs in zip(pending, _stamps.read([reading.row for reading in pending]), strict=True):
        reading.trace.measure(reading.admission, runs(epochs))


def runs(epochs: Any) -> tuple[EpochSpan, ...]:
    """Equal neighbours as spans. `epochs`: (positions,) on the CPU."""
    if not len(epochs):
        return ()
    ends = [*((epochs[1:] != epochs[:-1]).nonzero().flatten() + 1).tolist(), len(epochs)]
    starts = [0, *ends[:-1]]
    return tuple(EpochSpan(int(epochs[start]), start, end) for start, end in zip(starts, ends, strict=True))


def _after_tree(tree: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    global _stamps, _rows
    slots = ctx.params.token_to_kv_pool_allocator
    _rows = ctx.params.req_to_token_pool
    mapping = getattr(slots, "full_to_swa_index_mapping", None)
    if mapping is None:
        _stamps = SlotStamps(int(slots.size) + int(slots.page_size), slots.device)
    else:
        window = int(slots.size_swa) + int(slots.page_size)
        _stamps = SlotStamps(len(mapping), slots.device, mapping, window)
    return tree


def _before_forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    slots = forward_batch.out_cache_loc
    if _stamps is None or runner.is_draft_worker or slots is None:
        return
    settle()  # what was given back may be written over by this pass
    _stamps.write(slots, EPOCH.number)


def _before_release(req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    trace = kv_spans.trace_of(req)
    # Another rank than the one that answers would read what nobody asks for.
    if trace is None or tensor_ranks.RANKS.place.rank or _stamps is None or not holds_kv(req):
        return
    length = generation.committed_length(req)
    row = _rows.req_to_token[generation.row_of(req), :length].clone()
    _pending.append(Reading(trace, len(trace.admissions) - 1, row))
