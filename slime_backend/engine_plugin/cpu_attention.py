"""Attention on a CPU that is right for sliding windows and does not recompute what a prefix hit gave.

Replaces the attention backend `torch_native` on CPU runners (0.5.23, layers/attention/torch_native_backend.py), needed
in SGLang 0.5.15.post1 to 0.5.23, where that backend
  - reads sliding-window layers with slots of the full pool (:153 and :262; only the write is translated, :57-67),
    which is an IndexError or, silently, the KV of other tokens;
  - computes queries for the cached prefix as well (:143), so that a prefix hit saves no attention at all;
  - decodes request by request (:236);
  - ignores a layer's logit cap.
The name stays, because choices, resolvers and `support_triton` treat any other name as a GPU backend. Anything that is
not plain causal self-attention (cross attention, encoders, speculative batches) is left to the class it replaces.
The backend itself is in cpu_attention_backend.py.
"""

from __future__ import annotations

from typing import Any

import torch

from slime_backend import wire
from slime_backend.engine_plugin import hf_window, registry
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "cpu_attention"
BACKEND = "torch_native"
STOCK = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
USES: tuple[Need, ...] = (  # of cpu_attention_backend.py as well
    "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
    *(f"{STOCK}.{name}" for name in ("init_forward_metadata", "forward_extend", "forward_decode")),
    *(f"{STOCK}.{name}" for name in ("token_to_kv_pool", "req_to_token_pool", "swa_out_cache_loc")),
    "sglang.srt.layers.radix_attention.AttentionType.ENCODER_ONLY",
    "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
    *(f"{POOL}.{name}" for name in ("layers_mapping", "get_key_buffer", "get_value_buffer", "set_kv_buffer")),
    f"{POOL}.translate_loc_from_full_to_swa",
)


def plan(sglang: Sglang) -> Plan:
    return Plan(((hf_window.TARGET, "after", hf_window.shorten_windows),), USES)


def install() -> str:
    """Re-register the backend; active once a runner has built it."""
    from sglang.srt.layers.attention import attention_registry

    stock_factory = attention_registry.ATTENTION_BACKENDS.get(BACKEND)
    if stock_factory is None:
        return f"this SGLang has no attention backend {BACKEND}"

    def build(runner: Any) -> Any:
        if torch.device(runner.device).type != "cpu":
            registry.set_status(HOOK, f"the engine runs on {runner.device}, not on a CPU")
            return stock_factory(runner)
        # Its base class is SGLang's: imported only where the backend is built.
        from slime_backend.engine_plugin.cpu_attention_backend import CpuAttentionBackend

        registry.set_status(HOOK, wire.ACTIVE)
        return CpuAttentionBackend(runner)

    status = registry.install(HOOK, plan(IMPORTED))
    if status != wire.ACTIVE:
        return status
    attention_registry.ATTENTION_BACKENDS[BACKEND] = build
    return f"no runner of this process uses the attention backend {BACKEND}"
