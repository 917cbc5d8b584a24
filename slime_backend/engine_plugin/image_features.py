"""Empties SGLang's caches of image, video and audio features when the weights change, and counts what is in it.

The cache is on by default (SGLANG_VLM_CACHE_SIZE_MB), keyed by the content of an image alone, and nothing in SGLang
clears it: not a flush, not an update (0.5.23, managers/mm_schedule.py; 0.5.15.post1, managers/mm_utils.py). After an
update of the vision tower it would go on serving features of the old one, whatever the policy. The tower of Kimi-VL
also keeps its position embeddings interpolated to each size of image (models/kimi_vl_moonvit.py): they were computed
from its weights, and go with the features.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
INTERPOLATED = "_interpolated_pos_emb_cache"  # a dictionary in modules of a vision tower
MODULES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")  # from 0.5.18, and before
USES = (
    tuple(f"{module}.embedding_cache" for module in MODULES),
    f"{SCHEDULER}.model_config",
    f"{SCHEDULER}.tp_worker",
)


def caches() -> list[Any]:
    """The feature caches of this process, each once."""
    found = [getattr(sys.modules.get(module), "embedding_cache", None) for module in MODULES]
    return list({id(cache): cache for cache in found if cache is not None}.values())


def interpolated(scheduler: Any) -> list[dict[Any, Any]]:
    """The caches of interpolated embeddings inside the model that this scheduler serves."""
    return _inside(scheduler.tp_worker.model_runner.model) if _is_multimodal(scheduler) else []


@functools.lru_cache(maxsize=1)  # a report is read while the engine is paused; SGLang updates the model in place
def _inside(model: Any) -> list[dict[Any, Any]]:
    return [vars(module)[INTERPOLATED] for module in model.modules() if INTERPOLATED in vars(module)]


def clear(scheduler: Any, ending: int) -> None:
    """Drop every feature, at the end of a weight epoch."""
    for cache in (*caches(), *interpolated(scheduler)):
        cache.clear()


def count(scheduler: Any) -> int:
    """Entries in the caches; -1 where the model takes images and no cache was found, so that none can be cleared."""
    found = caches()
    if not found and _is_multimodal(scheduler):
        return -1
    return sum(len(cache) for cache in (*found, *interpolated(scheduler)))


def _is_multimodal(scheduler: Any) -> bool:
    return bool(getattr(scheduler.model_config, "is_multimodal", False))
