"""Sliding windows of models served through `--model-impl transformers` get the length that Hugging Face means.

Needed in SGLang 0.5.15.post1 and 0.5.23: models/transformers.py (:939 and :942) hands Hugging Face's `sliding_window`
W to RadixAttention as it is. Hugging Face counts the token itself among its W keys; RadixAttention means W keys
before the token (torch_native_backend.py:56, `k >= q - W`), as SGLang's own models show by passing W - 1. Each token
sees one key too many: log-probs are off by up to 2e-2 on a tiny model with W = 128. Part of the hook `cpu_attention`.
It looks at each layer it is given and leaves one alone whose window is not W.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.models.transformers.TransformersBase._create_attention_instances"


def shorten_windows(instances: dict[int, Any], model: Any, *args: Any) -> dict[int, Any]:
    """AFTER `_create_attention_instances`: W keys with the token itself are W - 1 keys before it."""
    window = getattr(model.text_config, "sliding_window", None) or getattr(model.config, "sliding_window", None)
    if window is not None:
        for attention in instances.values():
            if attention.sliding_window_size == window:
                attention.sliding_window_size = window - 1
    return instances
