"""Measure how long a scoped sweep takes, node by node as SGLang evicts and as one group of frees. Needs only SGLang.

PYTHONPATH=. python scripts/measure_sweep.py [SLOTS] [ENTRIES]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from slime_backend.engine_plugin import scope
from tests.engine_plugin.tree_only import Cache

TOKENS = 100  # of an entry
ROUNDS = 3


def filled(slots: int, entries: int) -> Cache:
    cache = Cache(full_slots=slots, swa_slots=slots)
    for allocator in (cache.slots.full_attn_allocator, cache.slots.swa_attn_allocator):
        allocator.debug_mode = False  # the tests look for slots that are freed twice at each free
    chance = random.Random(1)
    for _ in range(entries):
        cache.prompt([chance.randrange(1 << 16) for _ in range(TOKENS)])
    return cache


def plain(tree: Any) -> None:
    wanted = EvictParams(num_tokens=tree.full_evictable_size(), swa_num_tokens=tree.swa_evictable_size())
    tree.evict(wanted)


def main() -> None:
    torch.set_num_threads(1)  # as an engine of ours; more of them would wait for each other on a busy machine
    slots, entries = (int(a) for a in (sys.argv[1:] + ["1000000", "3000"][len(sys.argv) - 1 :])[:2])
    for name, sweep in (("node by node", plain), ("one group", scope.sweep)):
        taken = []
        for _ in range(ROUNDS):
            cache = filled(slots, entries)
            started = time.perf_counter()
            sweep(cache.tree)
            taken.append((time.perf_counter() - started) * 1000)
            assert cache.slots.full_available_size() == slots
        median = statistics.median(taken)
        print(f"{slots} slots, {entries} entries of {TOKENS} tokens, {name}: {median:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
