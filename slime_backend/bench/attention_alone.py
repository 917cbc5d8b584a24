"""This times the attention of a pass by itself, for `bench attention`.

Both backends get the same keys and values, without the rest of a step and without a request around it.

A pass is what SGLang's runner calls of a backend (0.5.23, layers/attention/base_attn_backend.py): its metadata once,
then one call for each layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from slime_backend.bench.rows import Row, cost_row

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Heads:
    """These are the heads of a model's attention; a pass takes `layers` layers here."""

    name: str
    query: int
    key: int
    dim: int
    layers: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass has `cached` and `new` tokens of each of `requests`; with one new token it is a decode."""

    name: str
    requests: int
    cached: int
    new: int
    at_least: float  # times faster, the goal

    @property
    def decode(self) -> bool:
        return self.new == 1


TINY = Heads("tiny model", query=4, key=2, dim=16, layers=2)
SMOLLM2 = Heads("heads of SmolLM2-135M", query=9, key=3, dim=64, layers=2)


def alone_rows(heads: Heads, passes: Sequence[Pass], rounds: int = ROUNDS) -> list[Row]:
    """Time each pass on one thread, in ms, the peer and ours in turns after a round that isn't counted."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [_row(heads, one, rounds) for one in passes]
    finally:
        torch.set_num_threads(threads)


def _row(heads: Heads, one: Pass, rounds: int) -> Row:
    runs = _runs(heads, one)
    found: dict[str, list[float]] = {side: [] for side in runs}
    for number in range(rounds + 1):
        for side in list(runs) if number % 2 else list(runs)[::-1]:
            started = time.perf_counter()
            runs[side]()
            found[side].append(1000 * (time.perf_counter() - started))
    case = f"attention alone, {one.name}, {heads.name}, ms"
    return cost_row(case, found["peer"][1:], found["ours"][1:], at_least=one.at_least)


def _runs(heads: Heads, one: Pass) -> dict[str, Callable[[], Any]]:
    """Return for each side one pass of its backend; all write the same keys into the same slots."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from slime_backend.engine_plugin.cpu_attention_backend import CpuAttentionBackend

    length = one.cached + one.new
    rows = torch.arange(1, one.requests * length + 1, dtype=torch.int32).view(one.requests, length)  # slot 0 is padding
    pool = _Pool(heads, one.requests * length + 1)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=rows), token_to_kv_pool=pool)
    each = torch.ones(one.requests, dtype=torch.long)
    batch = SimpleNamespace(
        seq_lens=each * length,
        req_pool_indices=torch.arange(one.requests),
        extend_prefix_lens=None if one.decode else each * one.cached,
        extend_seq_lens=None if one.decode else each * one.new,
        encoder_lens=None,
        out_cache_loc=rows[:, one.cached :].reshape(-1).long(),
    )
    layers = [_layer(heads, number) for number in range(heads.layers)]
    tokens = one.requests * one.new
    q = torch.randn(tokens, heads.query * heads.dim)
    k, v = (torch.randn(tokens, heads.key, heads.dim) for _ in range(2))

    def run(backend: Any) -> list[Any]:
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if one.decode else backend.forward_extend
        return [forward(q, k, v, layer, batch) for layer in layers]

    return {"peer": partial(run, TorchNativeAttnBackend(runner)), "ours": partial(run, CpuAttentionBackend(runner))}


def _layer(heads: Heads, number: int) -> Any:
    """Return the fields of SGLang's RadixAttention that the backends read."""
    return SimpleNamespace(
        layer_id=number,
        sliding_window_size=-1,
        logit_cap=0.0,
        tp_q_head_num=heads.query,
        tp_k_head_num=heads.key,
        qk_head_dim=heads.dim,
        v_head_dim=heads.dim,
        scaling=heads.dim**-0.5,
        is_cross_attention=False,
        attn_type=None,
    )


class _Pool:
    """The pool has keys and values (float32) of each layer, laid out as SGLang's for multi-head attention."""

    def __init__(self, heads: Heads, slots: int) -> None:
        import torch

        shape = (heads.layers, slots, heads.key, heads.dim)
        self._keys, self._values = (torch.randn(shape) for _ in range(2))

    def get_key_buffer(self, layer_id: int) -> Any:
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> Any:
        return self._values[layer_id]

    def set_kv_buffer(self, layer: Any, location: Any, k: Any, v: Any) -> None:
        self._keys[layer.layer_id, location.loc] = k
        self._values[layer.layer_id, location.loc] = v
