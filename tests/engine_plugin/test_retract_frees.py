"""The slots of retracted requests come back at once and are the same ones: on SGLang's own tree and allocator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req, retract_all

from slime_backend.engine_plugin import retract_frees
from tests.engine_plugin.tree_only import Cache

Retract = Callable[..., Any]


def with_hook(**arguments: Any) -> Any:
    return retract_frees._around_retract(retract_all, **arguments)


def in_flight(cache: Cache, count: int, tokens: int = 300, shared: int = 100) -> list[Req]:
    """Requests that decode behind a shared head, and the entries of one that ended."""
    chance = random.Random(1)
    ids = [chance.randrange(256) for _ in range(shared + tokens * (count + 1))]
    bodies = [ids[shared + tokens * i : shared + tokens * (i + 1)] for i in range(count + 1)]
    cache.prompt(ids[:shared] + bodies[0])
    reqs = [cache.start(ids[:shared] + body) for body in bodies[1:]]
    for req in reqs:
        cache.decode(req, range(40))
    return reqs


def take_back(cache: Cache, reqs: list[Req], retract: Retract) -> int:
    """Retract `reqs`; returns how often the allocator took slots back into its list."""
    full, taken = cache.slots.full_attn_allocator, []
    free = full.free

    def counted(index: Any) -> None:
        if full.free_group is None and index.numel():
            taken.append(index.numel())
        free(index)

    full.free = counted
    retract(
        reqs=reqs,
        req_to_token_pool=cache.rows,
        token_to_kv_pool_allocator=cache.slots,
        tree_cache=cache.tree,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    full.free = free
    cache.check()
    return len(taken)


def state(cache: Cache) -> tuple[list[int], list[int], int]:
    slots = cache.slots
    return (
        sorted(slots.full_attn_allocator.get_all_free_pages().tolist()),
        sorted(slots.swa_attn_allocator.get_all_free_pages().tolist()),
        cache.tree.full_evictable_size(),
    )


@pytest.mark.parametrize("page", [1, 16])
def test_the_same_slots_come_back_in_one_go(page: int) -> None:
    caches = [Cache(page=page), Cache(page=page)]
    plain, ours = (in_flight(cache, 8) for cache in caches)
    before = state(caches[0])
    assert before == state(caches[1])
    one_by_one, at_once = take_back(caches[0], plain, retract_all), take_back(caches[1], ours, with_hook)
    assert state(caches[0]) == state(caches[1]) != before
    assert all(not req.kv.holds_kv for req in ours)
    if page == 1:  # pages go back by another method
        assert one_by_one >= 8
        assert at_once == 1
    assert [cache.prompt(list(range(200))) for cache in caches] == [0, 0]  # and they serve again


def test_where_slots_are_short_sglang_evicts_as_it_always_did() -> None:
    caches = [Cache(full_slots=3000, swa_slots=3000), Cache(full_slots=3000, swa_slots=3000)]
    with envs.SGLANG_RETRACT_DECODE_STEPS.override(200):  # more than are free
        counts = []
        for cache, retract in zip(caches, (retract_all, with_hook), strict=True):
            reqs = in_flight(cache, 8)
            assert cache.slots.available_size() < 200 * len(reqs)
            counts.append(take_back(cache, reqs, retract))
    assert counts[0] == counts[1] > 8  # the requests' slots, and those of evicted entries
    assert state(caches[0]) == state(caches[1])


def test_a_request_that_can_not_be_released_leaves_no_slot_held_back() -> None:
    cache = Cache()
    first, second = in_flight(cache, 2)
    free = cache.slots.available_size()
    second.reset_for_retract = None  # not callable
    with pytest.raises(TypeError):
        take_back(cache, [first, second], with_hook)
    assert cache.slots.free_group is None
    assert cache.slots.available_size() > free
