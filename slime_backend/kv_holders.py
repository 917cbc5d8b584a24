"""What else, beside the radix tree on the device, can keep KV or features of older weights.

A pure table over an engine's own /server_info (SGLang 0.5.23 names; a key that is absent means the feature is). Each
holder is either handled, with a test on a real engine, or refused at admission with the reason. A user who knows better
may allow one by name: then it is his claim, and the audit is what checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Info = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KvHolder:
    name: str  # what `allow` takes
    present: Callable[[Info], bool]
    why: str  # what it keeps, and why that isn't covered
    way_out: str


def _on(key: str) -> Callable[[Info], bool]:
    return lambda info: bool(info.get(key))


REFUSED: tuple[KvHolder, ...] = (
    KvHolder(
        "hicache_storage",
        _on("hicache_storage_backend"),
        "HiCache's storage tier (L3) keeps pages that no flush clears; their keys hold tokens, and from 0.5.23 the "
        "caller's keys, but no weight version",
        "start without --hicache-storage-backend",
    ),
    KvHolder(
        "hicache",
        lambda info: bool(info.get("enable_hierarchical_cache")) and not info.get("hicache_storage_backend"),
        "HiCache's host tier (L2) is reset with the tree, but our evidence counts device slots only",
        "start without --enable-hierarchical-cache",
    ),
    KvHolder(
        "external_cache",
        lambda info: any(
            info.get(k) for k in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
        ),
        "LMCache, FlexKV and external linkers keep KV outside SGLang, where a flush doesn't reach",
        "start without the external cache",
    ),
    KvHolder(
        "streaming_session",
        lambda info: bool(info.get("enable_streaming_session") or info.get("enable_session_radix_cache")),
        "a streaming session lends its KV before any key is looked at, so neither flush nor scope applies to it",
        "start without --enable-streaming-session and --enable-session-radix-cache",
    ),
    KvHolder(
        "multimodal_features",
        lambda info: bool(info.get("enable_prefix_mm_cache") or info.get("enable_mm_global_cache")),
        "cached image features were computed by the vision tower of older weights, and no flush clears them",
        "start without --enable-prefix-mm-cache and --enable-mm-global-cache",
    ),
    KvHolder(
        "draft_model",
        _on("speculative_algorithm"),
        "a draft model has a KV cache and weights of its own; whether an update reaches both depends on the draft",
        "start without --speculative-algorithm",
    ),
    KvHolder(
        "pd_disaggregation",
        lambda info: info.get("disaggregation_mode") not in (None, "", "null"),
        "prefill and decode engines hand KV over while one of them may already have new weights",
        "start with --disaggregation-mode null",
    ),
    KvHolder(
        "lora",
        lambda info: bool(info.get("enable_lora") or info.get("lora_paths")),
        "cache keys hold the adapter's name, so an adapter that is loaded again under its old name finds old KV",
        "start without --enable-lora",
    ),
    KvHolder(
        "tokenizer_workers",
        lambda info: int(info.get("tokenizer_worker_num") or 1) > 1,
        "a pause reaches one of several tokenizer workers, the others go on admitting requests",
        "start with --tokenizer-worker-num 1",
    ),
)

NAMES = tuple(holder.name for holder in REFUSED)


def unhandled(info: Info, allow: frozenset[str] = frozenset()) -> list[KvHolder]:
    """The holders that this engine has and nobody allowed."""
    return [h for h in REFUSED if h.name not in allow and h.present(info)]
