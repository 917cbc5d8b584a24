"""SGLang's own radix tree, slot allocator and requests on the CPU, without a server: what the scheduler does with them.

`Cache.prompt` follows Scheduler and PrefillAdder of 0.5.23: match, lock, take a row and slots, checkpoint after every
chunk (mem_cache/common.py:checkpoint_kv_cache), release at the end (release_kv_cache). Nothing is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from slime_backend.engine_plugin import swa_anchors
from slime_backend.engine_plugin.anchor_plan import Planner

CHECKPOINT = UnifiedRadixCache.checkpoint_into_tree


@dataclass(eq=False)
class Cache:
    """One tree over one pair of pools; `planner` None is SGLang as it is."""

    core: str = "rust"
    page: int = 1
    window: int = 128
    chunk: int = 16384
    full_slots: int = 40000
    swa_slots: int = 40000
    planner: Planner | None = None
    peak_swa: int = 0
    _names: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=self.page, device="cpu"))
        self.rows = ReqToTokenPool(16, 20000, "cpu", False)
        shape = {"size": self.full_slots, "size_swa": self.swa_slots, "page_size": self.page, "dtype": torch.float32}
        pool = SWAKVPool(
            **shape,
            head_num=1,
            head_dim=2,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            device="cpu",
        )
        with envs.SGLANG_DEBUG_MEMORY_POOL.override(True):  # a slot that is freed twice raises
            self.slots = SWATokenToKVPoolAllocator(**shape, device="cpu", kvcache=pool, need_sort=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.slots,
                page_size=self.page,
                sliding_window_size=self.window,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
                tree_core_backend=self.core,
            )
        )

    def start(self, ids: Sequence[int], *, anchors: Any = None, key: str | None = None, ends: bool = False) -> Req:
        """A request whose whole prompt is prefilled and checkpointed; `found` is what it got from the cache.

        `ends`: its first token is its last, so the last chunk goes into the tree with the release only.
        """
        custom = None if anchors is None else {"kv_anchors": anchors}
        self._names += 1
        req = Req(
            rid=str(self._names),
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=8, custom_params=custom),
            extra_key=key,
        )
        req.init_next_round_input(self.tree)
        req.found = found = req.prefix_len
        req.lock = self.tree.lock(req.last_node)
        prefix = self.tree.path_device_indices(req.last_node)[:found].to(torch.int32)
        self.rows.alloc([req])
        self.rows.write((req.kv.req_pool_idx, slice(0, found)), prefix)
        done = found
        while done < len(ids):
            end = min(len(ids), done + self.chunk)
            self._extend(req, done, end)
            req.extend_end = end
            if not (ends and end == len(ids)):
                self._checkpoint(req)
            done = end
            self.check()
        return req

    def decode(self, req: Req, output: Sequence[int]) -> None:
        for token in output:
            req.output_ids.append(token)
            self._extend(req, req.kv.kv_committed_len, req.kv.kv_committed_len + 1)

    def finish(self, req: Req, output: Sequence[int] = ()) -> int:
        """Decode `output`, end the request and return what it had found."""
        self.decode(req, output)
        req.finished_reason = FINISH_LENGTH(len(output))
        with self._patched():
            common.release_kv_cache(req, self.tree, checkpoint=True)
        self.check()
        return req.found

    def prompt(self, ids: Sequence[int], output: Sequence[int] = (3, 4), **options: Any) -> int:
        """A whole request; the tokens that it found in the cache."""
        return self.finish(self.start(ids, **options), output)

    def used_swa(self) -> int:
        return self.swa_slots // self.page * self.page - int(self.slots.swa_available_size())

    def check(self) -> None:
        """SGLang's own invariants (scheduler_components/invariant_checker.py:79), requests' own slots left out."""
        self.tree.sanity_check()
        tree, slots = self.tree, self.slots
        self.peak_swa = max(self.peak_swa, self.used_swa())
        if self.rows.available_size() == self.rows.size:  # nothing is running
            assert (tree.full_protected_size(), tree.swa_protected_size()) == (0, 0)
            for free, cached, size in (
                (slots.full_available_size(), tree.full_evictable_size(), self.full_slots),
                (slots.swa_available_size(), tree.swa_evictable_size(), self.swa_slots),
            ):
                assert free + cached == size // self.page * self.page

    def _checkpoint(self, req: Req) -> None:
        with self._patched():
            common.checkpoint_kv_cache(req, self.tree)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """The hook as SGLang's registry would have attached it, with this cache's planner."""

        def around(tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
            swa_anchors._around_checkpoint(CHECKPOINT, tree, req, up_to=up_to, **kwargs)

        with (
            mock.patch.object(swa_anchors, "_planner", self.planner),
            mock.patch.object(UnifiedRadixCache, "checkpoint_into_tree", around),
        ):
            yield

    def _extend(self, req: Req, start: int, end: int) -> None:
        """Slots for positions start..end, evicting what is needed (mem_cache/allocation.py)."""
        first = -(-start // self.page) * self.page
        pages = -(-max(0, end - first) // self.page)
        need = pages * self.page
        full, swa = self.slots.full_attn_allocator, self.slots.swa_attn_allocator
        short = max(0, need - full.available_size()), max(0, need - swa.available_size())
        if any(short):
            self.tree.evict(EvictParams(num_tokens=short[0], swa_num_tokens=short[1]))
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if first > start:  # the rest of a page that the request owns already
            last = int(row[start - 1])
            row[start : min(end, first)] = torch.arange(last + 1, last + 1 + min(end, first) - start)
        if need:
            got, swa_got = full.alloc(need), swa.alloc(need)
            assert got is not None, "the full pool is exhausted"
            assert swa_got is not None, "the sliding-window pool is exhausted"
            self.slots.full_to_swa_index_mapping[got] = swa_got
            row[first:end] = got[: end - first].to(torch.int32)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        self.peak_swa = max(self.peak_swa, self.used_swa())
