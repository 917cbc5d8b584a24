"""Empties SGLang's cache of image, video and audio features when the weights change, and counts what is in it.

The cache is on by default (SGLANG_VLM_CACHE_SIZE_MB), keyed by the content of an image alone, and nothing in SGLang
clears it: not a flush, not an update (0.5.23, managers/mm_schedule.py; 0.5.15.post1, managers/mm_utils.py). After an
update of the vision tower it would go on serving features of the old one, whatever the policy.
"""

from __future__ import annotations

import sys
from typing import Any

MODULES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")  # by generation


def caches() -> list[Any]:
    """The feature caches of this process, each once."""
    found = [getattr(sys.modules.get(module), "embedding_cache", None) for module in MODULES]
    return list({id(cache): cache for cache in found if cache is not None}.values())


def clear(scheduler: Any, ending: int) -> None:
    """Drop every feature, at the end of a weight epoch."""
    for cache in caches():
        cache.clear()


def count(scheduler: Any) -> int:
    """Entries in the caches; -1 where the model takes images and no cache was found, so that none can be cleared."""
    found = caches()
    if not found and getattr(scheduler.model_config, "is_multimodal", False):
        return -1
    return sum(len(cache) for cache in found)
