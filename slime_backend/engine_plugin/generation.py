"""The two SGLang generations behind one set of names: 0.5.23 and 0.5.15.post1 (slime's pin).

Changes nothing. Each function looks for the attribute or the module that it is about to use, never for a version
number, so a release in between gets whichever form it has. What a generation lacks altogether is a hook of its own
(label_relay.py, egress.py, retract_flush.py, sampled_spans.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def holds_kv(req: Any) -> bool:
    """Whether a request holds KV slots. A request's KV record came with 0.5.23; before, its row says so."""
    record = getattr(req, "kv", None)
    if record is None:
        return req.req_pool_idx is not None
    # A backup on the host is restored instead of prefilled again, so it is KV that the request holds.
    return bool(record.holds_kv) or getattr(record, "retraction_backup", None) is not None


def committed_length(req: Any) -> int:
    """Positions of a KV-holding request whose KV is written, or will be by a pass that was launched."""
    record = getattr(req, "kv", None)
    return int((record if record is not None else req).kv_committed_len)


def prefix_length(req: Any) -> int:
    """Tokens that a request about to be prefilled found in the cache."""
    length = getattr(req, "prefix_len", None)
    return len(req.prefix_indices) if length is None else int(length)


def batched_requests(scheduler: Any) -> list[Any]:
    """Requests of the batches that run or ran last; some may be there twice, or finished."""
    if hasattr(scheduler, "collect_inflight_reqs"):
        return list(scheduler.collect_inflight_reqs())
    batches: Iterable[Any] = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch)
    return [req for batch in batches if batch is not None for req in batch.reqs]


def session_records_holding_kv(tree: Any) -> int:
    """Streaming sessions that keep KV between their requests."""
    if hasattr(tree, "session_records"):
        return sum(bool(record.holds_kv) for record in tree.session_records().values())
    return int(tree.session_held_req_count())


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


def served_version() -> str:
    """The version label that this process knows."""
    from sglang.srt import runtime_context

    current = getattr(runtime_context, "get_serving", None) or runtime_context.get_server_args
    return str(current().weight_version)


def scheduler_learns_labels() -> bool:
    """Whether /update_weight_version reaches the schedulers; in 0.5.15.post1 it stays in the HTTP process."""
    return hasattr(pkgutil.resolve_name(SCHEDULER), "handle_update_weight_version")


def has_streamer_extension() -> bool:
    """Whether SGLang lets the output streamer be replaced by a subclass (0.5.23)."""
    return hasattr(pkgutil.resolve_name(SCHEDULER), "get_output_streamer_class")


def reports_sampled_spans() -> bool:
    """Whether a response says by itself which version sampled which token (0.5.23)."""
    return importlib.util.find_spec("sglang.srt.utils.weight_versions") is not None


def flushes_while_paused() -> bool:
    """Whether the idle test before a flush looks past requests that only wait (0.5.23)."""
    return "ignore_waiting" in inspect.signature(pkgutil.resolve_name(SCHEDULER).is_fully_idle).parameters
