"""Counts a scheduler's free KV slots, rows and states, against what was free when nothing was in use.

The capacity isn't read from a pool's `size`: an allocator may never hand that out (whole pages only, a reserved page
per shard, a ring per request row, a smaller second pool). What is free once the prefix cache has been built, and before
the first request, is what must be free again in an empty engine. Works with SGLang 0.5.23 and 0.5.15.post1.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_plugin import registry

log = logging.getLogger(__name__)

TREE = "sglang.srt.mem_cache.registry.create_tree_cache"
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


def install(hook: str) -> str:
    return registry.attach(hook, [(TREE, "after", _after_tree)])


def _after_tree(tree: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    global _when_empty
    try:
        _when_empty = free(ctx.params.token_to_kv_pool_allocator, ctx.params.req_to_token_pool)
    except Exception:  # the report then says that it is missing, and the controller refuses the engine
        log.exception("reef-slime: the free slots of an empty engine can't be counted")
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
