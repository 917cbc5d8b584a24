"""Radix-cache entries carry the weight epoch they were computed under, and a publication sweeps the older ones.

Lets requests keep their KV across a publication while others share prefixes. Works with SGLang 0.5.22 and 0.5.23 (the
lines below) and is needed in every version: a match looks at tokens, `extra_key` and `cache_salt` only
(mem_cache/common.py:193), so after an update it hands out prefixes that the old weights computed. Four rules:

    stamp     a request that holds no KV gets the current epoch into its key, each time before it is matched
              (common.py:221, schedule_policy.py:346): the epoch of its admission to prefill, never of its arrival
    keep      a request that holds KV keeps its stamp: it decodes on, or prefills its next chunk, on the KV it has
    withhold  a request of an older epoch puts nothing into the tree any more; when it ends, what it had there goes too
    sweep     when an epoch ends, everything unlocked is evicted, before the first byte of the weights can change

The epoch is a count, so a return to an earlier version's name finds nothing of it. The key is "<epoch>:<caller's key>":
what a caller chose, and the LoRA id that SGLang appends to it, stays whole behind the first colon, and since every
entry bears a stamp no caller's key can pass for one. `cache_salt` is left alone.

Inactive, with the reason, where KV is kept or lent past the key: streaming sessions, HiCache and its storage, external
caches, disaggregated prefill and decode. Up to 0.5.21 a request's key is read in four places, none of them a function
of its own, so the hook isn't active there and `scoped` is refused at admission.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import epoch, registry
from slime_backend.engine_plugin.epoch import EPOCH
from slime_backend.engine_plugin.generation import CONTEXT, PREFIX_CACHE, RECORD, REQ, SCHEDULER
from slime_backend.engine_plugin.kv_evidence import counters
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.pools import SLOTS
from slime_backend.engine_plugin.registry import Plan

HOOK = "scope"
COMMON = "sglang.srt.mem_cache.common"
IN_BATCH = "sglang.srt.managers.schedule_policy.SchedulePolicy._compute_prefix_matches"
TREE = "sglang.srt.mem_cache.registry.create_tree_cache"
TREE_CLASS = "UnifiedRadixCache"  # its subclasses put KV elsewhere; the other trees have no epoch-wide sweep
UNIFIED = f"sglang.srt.mem_cache.unified_radix_cache.{TREE_CLASS}"
BASE = "sglang.srt.mem_cache.base_prefix_cache"
USES: tuple[Need, ...] = (
    *(f"{REQ}.{name}" for name in ("extra_key", "skip_radix_cache_insert")),
    *(f"{RECORD}.{name}" for name in ("holds_kv", "retraction_backup")),
    *(f"{UNIFIED}.{name}" for name in ("linker", "cache_controller", "token_to_kv_pool_allocator", "evict")),
    *(f"{PREFIX_CACHE}.{name}_evictable_size" for name in ("full", "swa")),
    *(f"{PREFIX_CACHE}.supports_{name}" for name in ("swa", "mamba")),
    *(f"{BASE}.EvictParams.{name}" for name in ("num_tokens", "swa_num_tokens", "mamba_num")),
    f"{BASE}.EvictResult.num_tokens_evicted",
    f"{UNIFIED}.mamba_evictable_size",
    *(f"{SLOTS}.free_group_{name}" for name in ("begin", "end")),
    f"{SCHEDULER}.tree_cache",
    *(f"{CONTEXT}.get_{name}" for name in ("disagg", "memory", "serving")),
)


@dataclass(slots=True)
class Stamp:
    """What this hook did to one request."""

    caller_key: str | None  # `extra_key` as it came, with the LoRA id
    epoch: int
    withheld: bool = False  # this hook barred it from the tree


# Whether this process's tree can be scoped; where it can't, keys and entries are left as they were.
_scoping = False
# Weak: SGLang may drop a request without finishing it.
_stamps: weakref.WeakKeyDictionary[Any, Stamp] = weakref.WeakKeyDictionary()


def install() -> str:
    """Attach; active once the scheduler has built a tree that can be scoped."""
    status = registry.install(HOOK, plan(IMPORTED))
    if status != wire.ACTIVE:
        return status
    EPOCH.on_end(_on_epoch_end, HOOK)
    return "this process has built no radix cache"


def plan(sglang: Sglang) -> Plan:
    functions: tuple[registry.HookFunction, ...] = (
        (TREE, "after", _after_tree),
        # The in-batch match of a cache-aware policy reads the key before it calls match_kv_cache
        # (schedule_policy.py:354): unstamped, a group of equal prompts would be prefilled twice. Other policies
        # don't look at the whole queue at every step, and neither does this.
        (IN_BATCH, "before", _before_in_batch),
        (f"{COMMON}.match_kv_cache", "before", _before_match),
        (f"{COMMON}.touch_waiting_prefix", "before", _before_match),
        (f"{COMMON}.checkpoint_kv_cache", "before", _before_checkpoint),
        (f"{COMMON}.release_kv_cache", "around", _around_release),
    )
    return epoch.plan(sglang) + Plan(functions, USES)


def scoped_key(number: int, caller_key: str | None) -> str:
    """The `extra_key` of epoch `number`: never the same for two epochs or two caller's keys ("" is None to SGLang)."""
    return f"{number}:{caller_key or ''}"


def stamp(req: Any, number: int) -> None:
    """Stamp `req` with epoch `number`, unless it holds KV, or a backup of it, that another epoch computed."""
    known = _stamps.get(req)
    if known is not None and known.epoch == number:
        return
    if req.kv.holds_kv or req.kv.retraction_backup is not None:
        return
    if known is None:
        known = _stamps[req] = Stamp(req.extra_key, number)
    elif known.withheld:
        req.skip_radix_cache_insert = known.withheld = False
    known.epoch = number
    req.extra_key = scoped_key(number, known.caller_key)


def withhold(req: Any, number: int) -> bool:
    """Keep `req` out of the tree if it is of an epoch before `number`; whether it is.

    Looked at when the tree is about to take its KV, not at the publication, so that no request can be missed.
    """
    known = _stamps.get(req)
    if known is None or known.epoch == number:
        return False
    if not req.skip_radix_cache_insert:  # SGLang sets it too, for good
        req.skip_radix_cache_insert = known.withheld = True
    return True


def sweep(tree: Any) -> None:
    """Evict every unlocked entry."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    wanted = EvictParams(
        num_tokens=int(tree.full_evictable_size()),
        swa_num_tokens=int(tree.swa_evictable_size()) if tree.supports_swa() else 0,
        mamba_num=int(tree.mamba_evictable_size()) if tree.supports_mamba() else 0,
    )
    # The allocator copies its list of free slots at each node that it takes back, unless they come as one group.
    slots = tree.token_to_kv_pool_allocator
    slots.free_group_begin()
    try:
        evicted = tree.evict(wanted)
    finally:
        slots.free_group_end()
    counters().swept_tokens += int(evicted.num_tokens_evicted)


def why_not_scoped(tree: Any) -> str | None:
    """Why entries of this process's tree can't be scoped, or None."""
    from sglang.srt.runtime_context import get_disagg, get_memory, get_serving

    if type(tree).__name__ != TREE_CLASS:
        return f"the cache is a {type(tree).__name__}, not a {TREE_CLASS}"
    if get_serving().enable_streaming_session:
        return "a streaming session lends its KV to its next request whatever the key (--enable-streaming-session)"
    if get_memory().enable_session_radix_cache:
        return "a session pins its entries past a sweep (--enable-session-radix-cache)"
    if get_memory().hicache_storage_backend is not None:
        return "the storage outlives this process and its count of epochs (--hicache-storage-backend)"
    if tree.linker is not None:
        return "an external cache keeps entries past a sweep (--enable-unified-cache-external-linker)"
    if tree.cache_controller is not None:
        return "entries that are being copied to the host are locked during a sweep (--enable-hierarchical-cache)"
    if get_disagg().disaggregation_mode != "null":
        return "the epoch of a prefill does not travel with its KV to the decode engine (--disaggregation-mode)"
    return None


def _after_tree(tree: Any, *args: Any, **kwargs: Any) -> Any:
    global _scoping
    reason = why_not_scoped(tree)
    _scoping = reason is None
    registry.set_status(HOOK, reason or wire.ACTIVE)
    return tree


def _before_in_batch(schedule: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    if _scoping:
        number = EPOCH.number
        for req in waiting_queue:
            stamp(req, number)


def _before_match(req: Any, *args: Any, **kwargs: Any) -> None:
    if _scoping:
        stamp(req, EPOCH.number)


def _before_checkpoint(req: Any, *args: Any, **kwargs: Any) -> None:
    withhold(req, EPOCH.number)


def _around_release(original: Any, req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    tree = tree_cache
    if not withhold(req, EPOCH.number):
        original(req, tree, *args, **kwargs)
        return
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    before = tree.full_evictable_size()
    original(req, tree, *args, **kwargs)
    # Its prompt, published before the epoch ended, was locked at the sweep. No match has touched it since, so the
    # least recently used entries are exactly these. (Under another eviction policy the next sweep takes the rest.)
    unlocked = int(tree.full_evictable_size() - before)
    if unlocked > 0:
        counters().swept_tokens += int(tree.evict(EvictParams(num_tokens=unlocked)).num_tokens_evicted)


def _on_epoch_end(scheduler: Any, ending: int) -> None:
    if not _scoping:
        return
    sweep(scheduler.tree_cache)
    counters().swept_epoch = ending + 1  # every entry from now on is of this epoch
