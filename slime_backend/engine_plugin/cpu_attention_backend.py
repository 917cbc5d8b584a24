"""The attention backend that the hook cpu_attention puts in the place of SGLang's `torch_native`.

A subclass of SGLang's class (0.5.23, layers/attention/torch_native_backend.py): importing this module imports SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import scaled_dot_product_attention

# Queries per block of a prefill: bounds the mask to 256 x context and lets a sliding layer skip keys before its window.
QUERY_BLOCK = 256
# Keys of a decode batch that are gathered at once: they stay in the processor's cache, and allocations this small are
# reused by malloc, where larger ones go back to the system and cost a page fault per 4 KiB each time.
GATHER_BYTES = 2**20

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, logit_cap: float) -> Tensor:
    """Softmax attention of q [B, K, Q, D] over k [B, K, N, D] and v [B, K, N, DV], `bias` added to the logits."""
    if logit_cap <= 0:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    # The fused kernel has no cap. float32, because tanh of a bfloat16 logit near the cap loses most of its digits.
    logits = logit_cap * torch.tanh(torch.matmul(q.float(), k.float().transpose(-1, -2)) * (scale / logit_cap))
    if bias is not None:
        logits = logits + bias
    return torch.matmul(logits.softmax(-1), v.float()).to(q.dtype)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [Q, heads, D] over k [1, K, Q, D] and v [1, K, Q, DV]: [Q, heads, DV].

    The causal kernel skips the upper triangle by itself, which no mask makes it do.
    """
    grouped = q.shape[1] != k.shape[1]
    block = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return block[0].transpose(0, 1)


def by_length(counts: Sequence[int]) -> list[list[int]]:
    """Requests in groups whose `counts` have one power of two, so that padding at most doubles the work; in each the
    shortest first, and equal ones in order."""
    buckets: dict[int, list[int]] = {}
    for request in sorted(range(len(counts)), key=counts.__getitem__):
        buckets.setdefault(counts[request].bit_length(), []).append(request)
    return list(buckets.values())


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Per pass: `init_forward_metadata`, then one `forward_*` per layer; layers share the index tensors."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._lengths: list[int] = forward_batch.seq_lens.tolist()
        self._rows: list[int] = forward_batch.req_pool_indices.tolist()
        prefixes, extends = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
        self._prefixes: list[int] | None = None if prefixes is None else prefixes.tolist()
        self._extends: list[int] | None = None if extends is None else extends.tolist()
        self._slots: dict[Any, Tensor] = {}
        self._biases: dict[Any, Tensor] = {}
        self._decode_parts: dict[Any, list[tuple[Tensor | None, Tensor, Tensor | None]]] = {}

    def _is_plain(self, layer: Any, forward_batch: Any) -> bool:
        return not (
            layer.is_cross_attention
            or layer.attn_type == AttentionType.ENCODER_ONLY
            or forward_batch.encoder_lens is not None  # rows start with the encoder's tokens
        )

    def _store(self, layer: Any, forward_batch: Any, k: Tensor | None, v: Tensor | None, save: bool) -> None:
        if save and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _pool_of(self, layer: Any) -> tuple[bool, int | None]:
        """Whether the layer's KV lives in the sliding-window pool, and its window (keys before the token)."""
        pool, window = self.token_to_kv_pool, layer.sliding_window_size
        in_swa_pool = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
        return in_swa_pool, None if window is None or window < 0 else int(window)

    def _slots_of(self, request: int, start: int, in_swa_pool: bool) -> Tensor:
        """KV slots of positions start .. length of one request, in the layer's pool."""
        key = (request, start, in_swa_pool)
        if key not in self._slots:
            row = self.req_to_token_pool.req_to_token[self._rows[request], start : self._lengths[request]].long()
            if in_swa_pool:
                row = self.token_to_kv_pool.translate_loc_from_full_to_swa(row).long()
            self._slots[key] = row
        return self._slots[key]

    def _bias(self, first: int, count: int, key_start: int, window: int | None, groups: int, dtype: Any) -> Tensor:
        """Additive causal (and window) mask for queries first .. first+count, repeated for each head of a group."""
        key = (first, count, key_start, window, groups, dtype)
        if key not in self._biases:
            start = first if window is None else key_start  # without a window, all keys before are seen
            query = torch.arange(first, first + count).unsqueeze(1)
            position = torch.arange(start, first + count).unsqueeze(0)
            seen = position <= query
            if window is not None:
                seen &= position >= query - window
            bias = torch.zeros(groups, count, first + count - key_start, dtype=dtype)
            bias[..., start - key_start :].masked_fill_(~seen, float("-inf"))
            self._biases[key] = bias.flatten(0, 1)
        return self._biases[key]

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attention of the new tokens only: q [tokens, heads * D] -> [tokens, heads * DV]."""
        if self._prefixes is None or self._extends is None or not self._is_plain(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._store(layer, forward_batch, k, v, save_kv_cache)
        heads, v_dim = layer.tp_q_head_num, layer.v_head_dim
        query = q.reshape(-1, heads, layer.qk_head_dim)
        output = query.new_empty(query.shape[0], heads, v_dim)
        plain_causal = self._pool_of(layer)[1] is None and not (layer.logit_cap or 0.0) > 0
        base = 0
        for request, (prefix, extend) in enumerate(zip(self._prefixes, self._extends, strict=True)):
            if extend == 0:
                continue
            new = slice(base, base + extend)
            keys, values, oldest = self._keys_and_values(request, prefix, layer, k, v, new, q.dtype)
            if prefix == 0 and plain_causal:
                output[new] = attend_causally(query[new], keys, values, layer.scaling)
            else:
                self._attend_in_blocks(query[new], keys, values, output[new], prefix, oldest, layer)
            base += extend
        output[base:] = 0  # rows that only pad the batch
        return output.view(-1, heads * v_dim)

    def _keys_and_values(
        self, request: int, prefix: int, layer: Any, k: Tensor | None, v: Tensor | None, new: slice, dtype: Any
    ) -> tuple[Tensor, Tensor, int]:
        """Keys and values [1, K, N, D] that the new tokens of a request may see, and the position of the first."""
        in_swa_pool, window = self._pool_of(layer)
        oldest = 0 if window is None else max(0, prefix - window)
        pool_keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if prefix == 0 and k is not None and v is not None and pool_keys.dtype == k.dtype:
            # What the pool holds, without a way through it.
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[new]
            values = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)[new]
        else:
            slots = self._slots_of(request, oldest, in_swa_pool)
            pool_values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            keys, values = pool_keys[slots].to(dtype), pool_values[slots].to(dtype)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None], oldest

    def _attend_in_blocks(
        self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, prefix: int, oldest: int, layer: Any
    ) -> None:
        """Attention of query [extend, heads, D] behind `prefix` tokens, into `output`, QUERY_BLOCK queries at a time.

        `oldest`: the position of the first of the keys.
        """
        extend, heads, dim = query.shape
        kv_heads, v_dim, window = layer.tp_k_head_num, layer.v_head_dim, self._pool_of(layer)[1]
        groups = heads // kv_heads
        for start in range(0, extend, QUERY_BLOCK):
            end = min(extend, start + QUERY_BLOCK)
            count, first = end - start, prefix + start
            low = oldest if window is None else max(oldest, first - window)
            bias = None
            if count > 1 or window is not None:
                bias = self._bias(first, count, low, window, groups, query.dtype)
            # Heads of a group share their keys: folded into the query axis, which the kernel handles fast.
            folded = query[start:end].view(count, kv_heads, groups, dim).permute(1, 2, 0, 3)
            span = slice(low - oldest, prefix + end - oldest)
            block = attend(
                folded.reshape(1, kv_heads, groups * count, dim),
                keys[:, :, span],
                values[:, :, span],
                bias,
                layer.scaling,
                layer.logit_cap or 0.0,
            )
            block = block.view(kv_heads, groups, count, v_dim).permute(2, 0, 1, 3)
            output[start:end] = block.reshape(count, heads, v_dim)

    def _parts_for(
        self, in_swa_pool: bool, window: int | None, heads_per_key: int, dtype: Any, most_keys: int
    ) -> list[tuple[Tensor | None, Tensor, Tensor | None]]:
        """Decode batch in parts for one kernel call each, of at most `most_keys` keys or one request: (request
        indices B, or None for the whole batch in order; slots [B * N]; bias or None)."""
        key = (in_swa_pool, window, heads_per_key, dtype, most_keys)
        if key in self._decode_parts:
            return self._decode_parts[key]
        starts = [0 if window is None else max(0, length - 1 - window) for length in self._lengths]
        counts = [length - start for length, start in zip(self._lengths, starts, strict=True)]
        table = self.req_to_token_pool.req_to_token
        parts: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
        for members in by_length(counts):
            lengths = [counts[request] for request in members]
            rows, widest = torch.tensor([self._rows[request] for request in members]), lengths[-1]
            if window is None:
                slots = table[:, :widest].index_select(0, rows)
            else:
                first = torch.tensor([starts[request] for request in members])
                at = (first[:, None] + torch.arange(widest)).clamp_(max=table.shape[1] - 1)
                slots = table[rows[:, None], at]
            outside = None
            if lengths[0] != widest:
                outside = torch.arange(widest) >= torch.tensor(lengths)[:, None]
                slots.masked_fill_(outside, 0)  # SGLang's own padding slot
            if in_swa_pool:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots.long())
            size = max(1, most_keys // widest)
            for low in range(0, len(members), size):
                high = min(low + size, len(members))
                part, width = slice(low, high), lengths[high - 1]
                bias = None
                if outside is not None and lengths[low] != width:
                    bias = torch.zeros(high - low, width, dtype=dtype)
                    bias.masked_fill_(outside[part, :width], float("-inf"))
                    bias = bias[:, None, None].expand(-1, 1, heads_per_key, -1)  # the kernel wants all queries
                in_order = members[part] == list(range(len(counts)))
                which = None if in_order else torch.tensor(members[part])
                parts.append((which, slots[part, :width].reshape(-1), bias))
        self._decode_parts[key] = parts
        return parts

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attention of one new token per request: q [B, heads * D] -> [B, heads * DV]."""
        if not self._is_plain(layer, forward_batch) or len(self._lengths) != q.shape[0]:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        self._store(layer, forward_batch, k, v, save_kv_cache)
        heads, kv_heads, dim, v_dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        per_key = heads // kv_heads
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, kv_heads, per_key, dim)
        output = query.new_empty(query.shape[0], kv_heads, per_key, v_dim)
        most_keys = GATHER_BYTES // (kv_heads * dim * keys.element_size())
        for members, slots, bias in self._parts_for(*self._pool_of(layer), per_key, q.dtype, most_keys):
            asked = query if members is None else query[members]
            size = asked.shape[0]
            key = keys.index_select(0, slots).view(size, -1, kv_heads, dim).to(q.dtype).transpose(1, 2)
            value = values.index_select(0, slots).view(size, -1, kv_heads, v_dim).to(q.dtype).transpose(1, 2)
            block = attend(asked, key, value, bias, layer.scaling, layer.logit_cap or 0.0)
            if members is None:
                output = block
            else:
                output[members] = block
        return output.reshape(-1, heads * v_dim)
