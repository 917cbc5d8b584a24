"""Counts a scheduler's free KV slots, rows and states, against what was free when nothing was in use.

The capacity isn't read from a pool's `size`: an allocator may never hand that out (whole pages only, a reserved page
per shard, a ring per request row, a smaller second pool). What is free once the prefix cache has been built, and before
the first request, is what must be free again in an empty engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_backend.engine_plugin.names import Need
from slime_backend.engine_plugin.registry import Plan

TREE = "sglang.srt.mem_cache.registry.create_tree_cache"
SLOTS = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
USES: tuple[Need, ...] = (
    f"{SLOTS}.available_size",
    f"{ROWS}.available_size",
    "sglang.srt.mem_cache.registry.TreeCacheBuildContext.params",
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams.token_to_kv_pool_allocator",
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams.req_to_token_pool",
)
# Parts of a UnifiedRadixCache that KvEvidence counts; a part of another name holds something that it doesn't.
COUNTED_PARTS = ("full", "swa", "mamba")


@dataclass(frozen=True, slots=True)
class Free:
    """What is free in each pool; 0 where the model has no such pool."""

    full: int
    swa: int
    rows: int
    mamba: int


_when_empty: Free | None = None


def plan() -> Plan:
    return Plan(((TREE, "after", _after_tree),), USES)


def _after_tree(tree: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    global _when_empty
    _when_empty = free(ctx.params.token_to_kv_pool_allocator, ctx.params.req_to_token_pool)
    return tree


def when_empty() -> Free:
    """What was free before the first request."""
    if _when_empty is None:
        raise LookupError("nobody counted the free slots when this scheduler built its prefix cache")
    return _when_empty


def free(slots: Any, rows: Any) -> Free:
    """What is free now."""
    states = getattr(rows, "mamba_allocator", None) or getattr(rows, "mamba_pool", None)
    return Free(
        full=_free_full(slots),
        swa=int(slots.swa_available_size()) if hasattr(slots, "swa_available_size") else 0,
        rows=int(rows.available_size()),
        mamba=int(states.available_size()) if states is not None else 0,
    )


def _free_full(slots: Any) -> int:
    """Free slots of the full pool, and of all shards of a sharded one (its `available_size` is the least of them)."""
    for count in ("full_available_size", "aggregate_free_size"):
        if hasattr(slots, count):
            return int(getattr(slots, count)())
    return int(slots.available_size())


def tree_name(tree: Any) -> str:
    """The class of the prefix cache, and its parts that nobody counts (`wire.KvEvidence.tree`)."""
    parts = [str(getattr(part, "name", part)).lower() for part in getattr(tree, "components", None) or ()]
    unknown = [part for part in parts if part not in COUNTED_PARTS]
    return "+".join([type(tree).__name__, *sorted(unknown)])
