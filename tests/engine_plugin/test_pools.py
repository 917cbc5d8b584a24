"""Free slots against what was free in the empty engine: on SGLang's own allocators, whose `size` isn't always that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from slime_backend.engine_plugin import guard, pools
from slime_backend.engine_plugin.pools import Free
from tests.engine_plugin.tree_only import Cache

ROWS = 8


def rows() -> ReqToTokenPool:
    return ReqToTokenPool(ROWS, 64, "cpu", False)


def built(slots: Any, own_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hook sees when SGLang has built its prefix cache."""
    monkeypatch.setattr(pools, "_when_empty", None)
    params = SimpleNamespace(token_to_kv_pool_allocator=slots, req_to_token_pool=own_rows)
    assert pools._after_tree("the tree", SimpleNamespace(params=params)) == "the tree"


def test_slots_of_one_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = TokenToKVPoolAllocator(100, torch.float32, "cpu", None, False)
    own_rows = rows()
    built(slots, own_rows, monkeypatch)
    assert pools.when_empty() == Free(full=100, swa=0, rows=ROWS, mamba=0)
    taken = slots.alloc(7)
    assert pools.free(slots, own_rows).full == 93
    slots.free(taken)
    assert pools.free(slots, own_rows) == pools.when_empty()


def test_a_pool_that_is_no_multiple_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = PagedTokenToKVPoolAllocator(107, 16, torch.float32, "cpu", None, False)
    built(slots, rows(), monkeypatch)
    assert slots.size == 107
    assert pools.when_empty().full == 96


def test_a_sharded_pool_counts_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `available_size` is that of the shard with the least, and `size` is never free."""
    slots = PageInterleavePoolAllocator(70, 16, 4, torch.float32, "cpu", None, False)
    built(slots, rows(), monkeypatch)
    empty = pools.when_empty().full
    assert empty == 4 * 4 * 16 != slots.size
    one_page = slots.class_free_pages[2][:1]
    slots.class_free_pages[2] = slots.class_free_pages[2][1:]
    assert pools.free(slots, rows()).full == empty - 16
    slots.class_free_pages[2] = torch.cat((slots.class_free_pages[2], one_page))
    slots.class_free_pages[3] = slots.class_free_pages[3][:0]  # by the least shard alone, the next page would hide
    held = pools.free(slots, rows()).full
    slots.class_free_pages[2] = slots.class_free_pages[2][1:]
    assert slots.available_size() == 0
    assert pools.free(slots, rows()).full == held - 16


def test_two_pools_of_a_model_with_sliding_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(full_slots=4001, swa_slots=2003, page=16)
    built(cache.slots, cache.rows, monkeypatch)
    assert pools.when_empty() == Free(full=4000, swa=2000, rows=16, mamba=0)
    cache.prompt(list(range(100)))
    assert pools.free(cache.slots, cache.rows) != pools.when_empty()
    cache.tree.reset()
    cache.slots.clear()
    assert pools.free(cache.slots, cache.rows) == pools.when_empty()


def test_a_ring_for_each_request_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a ring per row the sliding-window pool's free slots are free rows times the ring."""
    cache = Cache()
    cache.slots._swa_req_ring, cache.slots._swa_ring_cost = True, 130
    cache.slots._req_to_token_pool = cache.rows
    built(cache.slots, cache.rows, monkeypatch)
    assert pools.when_empty().swa == cache.rows.available_size() * 130 != cache.slots.size_swa


def test_states_of_linear_attention_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    states = MambaSlotAllocator(size=12, device="cpu")
    own_rows = SimpleNamespace(available_size=lambda: ROWS, mamba_allocator=states)
    slots = TokenToKVPoolAllocator(100, torch.float32, "cpu", None, False)
    built(slots, own_rows, monkeypatch)
    assert pools.when_empty().mamba == 12
    taken = states.alloc(5)
    assert pools.free(slots, own_rows).mamba == 7
    states.free(taken)
    assert pools.free(slots, own_rows) == pools.when_empty()


def test_an_engine_that_was_never_seen_empty_has_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_when_empty", None)
    faults: list[Exception] = []
    after_tree = guard.guarded("after", pools._after_tree, faults.append)
    params = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(), req_to_token_pool=rows())
    assert after_tree("the tree", SimpleNamespace(params=params)) is None  # to SGLang: the tree stays
    assert "available_size" in str(faults[0])
    with pytest.raises(LookupError, match="nobody counted the free slots"):
        pools.when_empty()


def test_parts_of_a_cache_that_nobody_counts_are_named() -> None:
    tree = Cache().tree
    assert pools.tree_name(tree) == "UnifiedRadixCache"
    tree.components = {ComponentType.FULL: None, ComponentType.C128: None}
    assert pools.tree_name(tree) == "UnifiedRadixCache+c128"
