"""The releases of SGLang from 0.5.15.post1 to 0.5.23 behind one set of names.

Changes nothing. Each function looks for the attribute that it is about to use, never for a version number, and on the
object that has it: a request has a record `kv` from 0.5.16, which says whether it `holds_kv` from 0.5.19. What the
functions use stands in a table next to them, for the hooks that call them. What a release lacks altogether is a hook of
its own (label_relay.py, egress.py, retract_flush.py, sampled_spans.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
REQ = "sglang.srt.managers.schedule_batch.Req"
RECORD = "sglang.srt.managers.schedule_batch.ReqKvInfo"  # a request's `kv`
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
PREFIX_CACHE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
CONTEXT = "sglang.srt.runtime_context"

KV_USES: tuple[Need, ...] = (
    (f"{RECORD}.holds_kv", f"{REQ}.req_pool_idx"),
    (f"{RECORD}.kv_committed_len", f"{REQ}.kv_committed_len"),
)


def holds_kv(req: Any) -> bool:
    """Whether a request holds KV slots. Its record says so from SGLang 0.5.19; before, its row does."""
    record: Any = getattr(req, "kv", None)
    if not hasattr(record, "holds_kv"):
        return req.req_pool_idx is not None
    # A backup on the host is restored instead of prefilled again, so it is KV that the request holds.
    return bool(record.holds_kv) or getattr(record, "retraction_backup", None) is not None


def committed_length(req: Any) -> int:
    """Positions of a KV-holding request whose KV is written, or will be by a pass that was launched."""
    record: Any = getattr(req, "kv", None)
    return int((record if hasattr(record, "kv_committed_len") else req).kv_committed_len)


ROW_USES: tuple[Need, ...] = ((f"{RECORD}.req_pool_idx", f"{REQ}.req_pool_idx"),)


def row_of(req: Any) -> int:
    """The row of a KV-holding request in the table of slots; in its record from SGLang 0.5.19."""
    record: Any = getattr(req, "kv", None)
    return int((record if hasattr(record, "req_pool_idx") else req).req_pool_idx)


PREFIX_USES: tuple[Need, ...] = ((f"{REQ}.prefix_len", f"{REQ}.prefix_indices"),)


def prefix_length(req: Any) -> int:
    """Tokens that a request about to be prefilled found in the cache; a number of its own from SGLang 0.5.22."""
    length = getattr(req, "prefix_len", None)
    return len(req.prefix_indices) if length is None else int(length)


BATCHES_USES: tuple[Need, ...] = (
    (f"{SCHEDULER}.collect_inflight_reqs", f"{SCHEDULER}.running_batch"),
    (f"{SCHEDULER}.collect_inflight_reqs", f"{SCHEDULER}.last_batch"),
    f"{BATCH}.reqs",
)


def batched_requests(scheduler: Any) -> list[Any]:
    """Requests of the batches that run or ran last; some may be there twice, or finished. Messages are handled between
    two steps, so a batch is one of these, or its result is queued; SGLang collects them itself from 0.5.19."""
    if hasattr(scheduler, "collect_inflight_reqs"):
        return list(scheduler.collect_inflight_reqs())
    current = getattr(scheduler, "cur_batch", None)  # 0.5.15.post1 alone
    batches: Iterable[Any] = (scheduler.running_batch, scheduler.last_batch, current)
    return [req for batch in batches if batch is not None for req in batch.reqs]


SESSION_USES: tuple[Need, ...] = ((f"{PREFIX_CACHE}.session_records", f"{PREFIX_CACHE}.session_held_req_count"),)


def session_records_holding_kv(tree: Any) -> int:
    """Streaming sessions that keep KV between their requests; as records from SGLang 0.5.22."""
    if hasattr(tree, "session_records"):
        return sum(bool(record.holds_kv) for record in tree.session_records().values())
    return int(tree.session_held_req_count())


PLACE_USES: tuple[Need, ...] = ((f"{CONTEXT}.get_parallel", f"{SCHEDULER}.ps"),)


def tensor_place(scheduler: Any) -> tuple[str, int, int]:
    """(group, rank, size) among the processes that one rank answers for: those of one pipeline stage and one attention
    data-parallel rank. Rank 0 is the one whose answers SGLang passes on.
    """
    from sglang.srt import runtime_context

    current = getattr(runtime_context, "get_parallel", None)
    parallel = current() if current is not None else scheduler.ps
    context_rank, context_size = getattr(parallel, "attn_cp_rank", 0), getattr(parallel, "attn_cp_size", 1)
    group = f"{parallel.pp_rank}.{getattr(parallel, 'attn_dp_rank', None) or 0}"
    rank = context_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    return group, int(rank), int(parallel.attn_tp_size * context_size)


def caches_mamba_states(tree: Any) -> bool:
    """Whether the prefix cache keeps states of linear-attention layers, which it then counts on their own."""
    return bool(tree.supports_mamba())


LABEL_USES: tuple[Need, ...] = ((f"{CONTEXT}.get_serving", f"{CONTEXT}.get_server_args"),)


def served_version() -> str:
    """The version label that this process knows; from SGLang 0.5.17 apart from the arguments of the start."""
    from sglang.srt import runtime_context

    current = getattr(runtime_context, "get_serving", None) or runtime_context.get_server_args
    return str(current().weight_version)


def serve_version(label: str) -> None:
    """Have this process know another version label, where SGLang does not do so itself (label_relay.py)."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "get_serving"):
        runtime_context.get_context().override("reef_slime.label", weight_version=label)
    else:
        runtime_context.get_server_args().weight_version = label


def scheduler_learns_labels(sglang: Sglang = IMPORTED) -> bool:
    """Whether /update_weight_version reaches the schedulers, as from SGLang 0.5.19; before, it stays in the HTTP
    process."""
    return sglang.has(f"{SCHEDULER}.handle_update_weight_version")


def has_streamer_extension(sglang: Sglang = IMPORTED) -> bool:
    """Whether SGLang lets the output streamer be replaced by a subclass, as from 0.5.19."""
    return sglang.has(f"{SCHEDULER}.get_output_streamer_class")


def reports_sampled_spans(sglang: Sglang = IMPORTED) -> bool:
    """Whether a response says by itself which version sampled which token, as from SGLang 0.5.19."""
    return sglang.has("sglang.srt.utils.weight_versions")


def flushes_while_paused(sglang: Sglang = IMPORTED) -> bool:
    """Whether the idle test before a flush looks past requests that only wait, as from SGLang 0.5.21."""
    test = sglang.parameters(f"{SCHEDULER}.is_fully_idle")
    return test is not None and "ignore_waiting" in test.positional


def serves_by_rust(sglang: Sglang = IMPORTED) -> bool:
    """Whether SGLang's HTTP process is the Rust server (from 0.5.17, off by default), which runs no Python hooks."""
    return bool(sglang.switch("sglang.srt.environ.Envs.SGLANG_RUST_SERVER"))
