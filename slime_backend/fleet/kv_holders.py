"""What can keep KV, features or weights of an older version past a publication, apart from the radix tree.

A pure table over an engine's own /server_info (SGLang 0.5.23 names; a key that is absent means the feature is). Each
holder is either handled, with a test on SGLang's own objects, or refused at admission with the reason. A prefix cache
that nobody has looked at is refused by the name of its class, whatever flag has put it there. A user who knows better
may allow a holder by name: then it is his claim, and the audit is what checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_backend.wire import REPORT_KEY

Info = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KvHolder:
    name: str  # what `allow` takes
    present: Callable[[Info], bool]
    why: str  # what it keeps, and why that isn't covered
    way_out: str


# The prefix caches that flush, sweep and evidence were tried with: 0.5.23's, then those that only 0.5.15.post1 has.
KNOWN_TREES = frozenset(
    (
        "UnifiedRadixCache",
        "PureSWARadixCache",
        "RadixCache",
        "SWARadixCache",
        "MambaRadixCache",
        "ChunkCache",
        "SWAChunkCache",
        "PureSWAChunkCache",
    )
)
# Classes that come with a flag that another row refuses; who allows that row allows them.
FLAGGED_TREES = frozenset(
    (
        "HiRadixCache",
        "HiMambaRadixCache",
        "LMCacheUnifiedRadixCache",
        "LMCRadixCache",
        "FlexKVRadixCache",
        "StreamingSession",
    )
)

LINEAR_ATTENTION = ("backend", "decode_backend", "prefill_backend", "verify_backend")


def _on(*keys: str) -> Callable[[Info], bool]:
    """Whether one of these settings is on."""
    return lambda info: any(info.get(key) for key in keys)


def unknown_trees(info: Info) -> list[str]:
    """Classes of prefix caches, as the plugin reports them rank by rank, that nobody has looked at."""
    states = info.get("internal_states") or ()
    reports = [state.get(REPORT_KEY) for state in states if isinstance(state, Mapping)]
    counts = [report.get("kv") for report in reports if isinstance(report, Mapping)]
    trees = {str(count["tree"]) for count in counts if isinstance(count, Mapping) and "tree" in count}
    return sorted(trees - KNOWN_TREES - FLAGGED_TREES)


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
        _on("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker", "radix_cache_backend"),
        "LMCache, FlexKV, external linkers and a --radix-cache-backend keep KV where no flush has been seen to reach",
        "start without the external cache",
    ),
    KvHolder(
        "unknown_cache",
        lambda info: bool(unknown_trees(info)),
        "its prefix cache is of a class, or has a part, that neither flush nor evidence has been tried with",
        "start with SGLang's own radix cache",
    ),
    KvHolder(
        "pipeline_parallel",
        lambda info: int(info.get("pp_size") or 1) > 1,
        "SGLang's loop for pipeline parallelism never looks at a pause, so it generates while weights are loaded",
        "start with --pp-size 1",
    ),
    KvHolder(
        "pdmux",
        _on("enable_pdmux"),
        "SGLang's loop for multiplexed prefill and decode never looks at a pause, so it generates while weights load",
        "start without --enable-pdmux",
    ),
    KvHolder(
        "hisparse",
        _on("enable_hisparse"),
        "HiSparse keeps KV on the host and in buffers on the device that no count of free slots covers",
        "start without --enable-hisparse",
    ),
    KvHolder(
        "mamba_checkpoints",
        _on("enable_int8_mamba_checkpoint"),
        "quantized states of linear-attention layers lie in a pool of their own that nobody counts",
        "start without --enable-int8-mamba-checkpoint",
    ),
    KvHolder(
        "encoder_disaggregation",
        _on("language_only", "encoder_only", "encoder_urls", "encoder_register_urls"),
        "image features come from encoder servers, with a cache of their own, that no publication updates",
        "start without --language-only, --encoder-only, --encoder-urls and --encoder-register-urls",
    ),
    KvHolder(
        "elastic_experts",
        _on("enable_elastic_expert_backup", "elastic_ep_backend"),
        "experts that are lost with a rank are loaded again from the weights that the engine was started with",
        "start without --elastic-ep-backend and --enable-elastic-expert-backup",
    ),
    KvHolder(
        "weight_copies",
        lambda info: (
            bool(info.get("kt_weight_path"))
            or info.get("weight_cache_mode") not in (None, "", "off")
            or (int(info.get("offload_group_size") or 0) > 0 and info.get("offload_mode") not in (None, "cpu"))
        ),
        "the weights that are computed with are copies (shared, sharded or offloaded) that an update doesn't reach",
        "start without --kt-weight-path, with --weight-cache-mode off and --offload-mode cpu",
    ),
    KvHolder(
        "linear_attention_flashinfer",
        lambda info: "flashinfer" in {info.get(f"linear_attn_{part}") for part in LINEAR_ATTENTION},
        "FlashInfer's kernels for linear attention keep copies of parameters, found by the identity of the tensor, "
        "so an update in place isn't seen",
        "start with --linear-attn-backend triton",
    ),
    KvHolder(
        "diffusion_decoding",
        _on("dllm_algorithm"),
        "a block of tokens is sampled in several passes, so the record of one pass a token doesn't hold",
        "start without --dllm-algorithm",
    ),
    KvHolder(
        "streaming_session",
        _on("enable_streaming_session", "enable_session_radix_cache"),
        "a streaming session lends its KV before any key is looked at, so neither flush nor scope applies to it",
        "start without --enable-streaming-session and --enable-session-radix-cache",
    ),
    KvHolder(
        "multimodal_features",
        _on("enable_prefix_mm_cache", "enable_mm_global_cache"),
        "a cache of image features outside the scheduler's process keeps those of the old vision tower",
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
        "SGLang passes a pause on to all of them, but a new version's name stays in the one that was asked: the others "
        "label their answers, and answer /model_info, with the old one",
        "start with --tokenizer-worker-num 1",
    ),
)

NAMES = tuple(holder.name for holder in REFUSED)


def unhandled(info: Info, allow: frozenset[str] = frozenset()) -> list[KvHolder]:
    """The holders that this engine has and nobody allowed."""
    return [h for h in REFUSED if h.name not in allow and h.present(info)]
