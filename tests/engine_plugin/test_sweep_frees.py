"""A sweep gives every slot back, and the allocator takes them in one go: on SGLang's own tree and allocator."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from slime_backend.engine_plugin import kv_evidence, scope
from tests.engine_plugin.tree_only import Cache

ENTRIES = 40


def filled(page: int, core: str) -> Cache:
    cache = Cache(page=page, core=core)
    chance = random.Random(3)
    head = [chance.randrange(256) for _ in range(160)]
    for _ in range(ENTRIES):
        cache.prompt(head + [chance.randrange(256) for _ in range(200)])
    return cache


def plain_sweep(tree: Any) -> int:
    """As SGLang evicts: each node's slots go back on their own."""
    wanted = EvictParams(num_tokens=tree.full_evictable_size(), swa_num_tokens=tree.swa_evictable_size(), mamba_num=0)
    return int(tree.evict(wanted).num_tokens_evicted)


def our_sweep(tree: Any) -> int:
    before = kv_evidence.counters().swept_tokens
    scope.sweep(tree)
    return kv_evidence.counters().swept_tokens - before


def swept(cache: Cache, sweep: Any) -> tuple[int, int]:
    """Tokens evicted by `sweep`, and how often the full pool's list of free slots was copied for it."""
    full, copies = cache.slots.full_attn_allocator, []
    takes = {name: getattr(full, name) for name in ("free", "_release_page_ids") if hasattr(full, name)}

    def counted(name: str) -> Any:
        def take(index: Any) -> None:
            if index.numel() and (name != "free" or (full.free_group is None and "_release_page_ids" not in takes)):
                copies.append(index.numel())
            takes[name](index)

        return take

    for name in takes:
        setattr(full, name, counted(name))
    evicted = sweep(cache.tree)
    for name in takes:
        setattr(full, name, takes[name])
    cache.check()
    return evicted, len(copies)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("page", [1, 16])
def test_all_slots_come_back_in_one_go(page: int, core: str) -> None:
    plain, ours = filled(page, core), filled(page, core)
    held = plain.tree.full_evictable_size()
    assert held > ENTRIES * 190
    one_by_one, at_once = swept(plain, plain_sweep), swept(ours, our_sweep)
    assert one_by_one[0] == at_once[0]
    assert one_by_one[1] >= ENTRIES  # the control: SGLang alone copies its list at each entry
    assert at_once[1] <= 2
    for cache in (plain, ours):
        assert cache.tree.full_evictable_size() == cache.tree.swa_evictable_size() == 0
        assert cache.slots.full_available_size() == cache.full_slots // page * page
        assert cache.slots.swa_available_size() == cache.swa_slots // page * page
        assert cache.slots.free_group is None


def test_a_sweep_that_fails_holds_no_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(1, "rust")

    def broken(wanted: Any) -> Any:
        raise RuntimeError("evict")

    monkeypatch.setattr(cache.tree, "evict", broken)
    with pytest.raises(RuntimeError):
        scope.sweep(cache.tree)
    assert cache.slots.free_group is None
