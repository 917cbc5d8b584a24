"""Puts into /server_info what each scheduler counted itself: KV in the tree, free slots, KV of requests, flushes.

Adds `internal_states[i]["reef_slime"]` (wire.SchedulerReport), one per data-parallel rank. Works with SGLang
0.5.15.post1 to 0.5.23 (the lines below), and is needed in each of them, because nothing else says that a flush was
carried out by every rank:
  - with DP > 1 /flush_cache returns rank 0's answer only (tokenizer_control_mixin.py:325);
  - /server_info has capacities but no occupancy, and a refused flush is one line in the log (scheduler.py:5540).

The same reports alone are answered by GET /reef_slime/reports, a route of our own: /server_info writes SGLang's whole
configuration twice, which takes 40 ms on one core, and between pause and verified all engines are paused for it. What
went wrong in the HTTP process's own hooks is added there. The Rust server (SGLANG_RUST_SERVER) has no such route; the
reports then come with /server_info alone.

Listens around Scheduler.flush_cache (:5518), pause_generation (:5817) and continue_generation (:5934), and adds to
get_internal_state (:5549) and, behind TokenizerManager.__init__, the route. The pause mode `abort` never reaches the
scheduler (tokenizer_manager.py:2272), so `paused` and `pauses` do not count it. `paused` is SGLang's own flag, which
some of its loops never read (pipeline parallelism, --enable-pdmux); `forward_passes` shows whether it is kept.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from dataclasses import astuple, dataclass, field
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import (
    device_fence,
    epoch,
    generation,
    image_features,
    loads,
    pools,
    registry,
    tensor_ranks,
)
from slime_backend.engine_plugin.epoch import EPOCH
from slime_backend.engine_plugin.generation import PREFIX_CACHE, REQ, SCHEDULER, holds_kv
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan

log = logging.getLogger(__name__)

HOOK = "kv_evidence"
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
SERVER = "sglang.srt.entrypoints.http_server"
GATHER_S = 5.0  # for the reports of an engine's other tensor ranks; a controller waits 10 s for the whole call
REPORT_ONLY = "reef-slime: report only"  # the id of a request for an internal state of nothing but our report

SCHEDULER_FIELDS = (
    *("waiting_queue", "running_batch", "last_batch", "chunked_req", "grammar_manager", "result_queue", "tree_cache"),
    *("token_to_kv_pool_allocator", "req_to_token_pool", "_engine_paused", "forward_ct"),
)
TREE_COUNTS = (
    *("evictable_size", "protected_size", "full_evictable_size", "full_protected_size", "supports_mamba"),
    *("swa_evictable_size", "swa_protected_size"),
)
USES: tuple[Need, ...] = (
    *(f"{SCHEDULER}.{name}" for name in SCHEDULER_FIELDS),
    *(f"{PREFIX_CACHE}.{name}" for name in TREE_COUNTS),
    f"{REQ}.finished",
    "sglang.srt.constrained.grammar_manager.GrammarManager.grammar_queue",
    *(f"sglang.srt.managers.io_struct.{name}" for name in ("GetInternalStateReq.rid", "PauseGenerationReqInput.mode")),
    "sglang.srt.managers.io_struct.GetInternalStateReqOutput.internal_state",
    f"{MANAGER}.auto_create_handle_loop",
    f"{MANAGER}.get_internal_state",  # the route asks as it does
    *generation.KV_USES,
    *generation.BATCHES_USES,
    *generation.SESSION_USES,
    *generation.PLACE_USES,
    *image_features.USES,
)


@dataclass(slots=True)
class Counters:
    """What this scheduler process did since it started, and its last pause."""

    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: int = field(default_factory=os.getpid)
    flush_epoch: int = 0
    flush_refused: int = 0
    last_refusal: dict[str, Any] | None = None
    pauses: int = 0
    pause_mode: str | None = None
    in_flight_at_pause: int = 0
    retracted_at_pause: int = 0
    tokens_at_pause: int = 0
    swept_epoch: int | None = None  # written by the hook scope
    swept_tokens: int = 0


_counters = Counters()


def counters() -> Counters:
    """Counters of this process: a child that was forked after loading the plugin starts its own."""
    global _counters
    if _counters.process != os.getpid():
        _counters = Counters()
    return _counters


def install() -> str:
    status = registry.install(HOOK, plan(IMPORTED))
    if status == wire.ACTIVE:
        EPOCH.on_end(image_features.clear, HOOK)
    return status


def plan(sglang: Sglang) -> Plan:
    functions: tuple[registry.HookFunction, ...] = (
        (f"{SCHEDULER}.get_internal_state", "around", _around_internal_state),
        (f"{MANAGER}.__init__", "after", _after_manager),
        (f"{SCHEDULER}.flush_cache", "around", _around_flush),
        (f"{SCHEDULER}.pause_generation", "around", _around_pause),
        (f"{SCHEDULER}.continue_generation", "around", _around_continue),
        (f"{SCHEDULER}.__init__", "after", tensor_ranks.after_scheduler),
        *loads.functions(),
    )
    return epoch.plan(sglang) + pools.plan() + Plan(functions, USES)


def live_requests(scheduler: Any) -> list[Any]:
    """Every unfinished or KV-holding request that the scheduler knows, each once."""
    found = [
        *scheduler.waiting_queue,
        *generation.batched_requests(scheduler),
        *scheduler.grammar_manager.grammar_queue,
    ]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    for batch, _ in getattr(scheduler, "result_queue", None) or ():  # exists with the overlap schedule only
        found.extend(batch.reqs)
    unique = {id(req): req for req in found}
    return [req for req in unique.values() if holds_kv(req) or not req.finished()]


def evidence(scheduler: Any) -> wire.KvEvidence:
    """Count the scheduler's KV. Runs on the scheduler's own thread, between two steps."""
    tree, own = scheduler.tree_cache, counters()
    free = pools.free(scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool)
    capacity = pools.when_empty()
    hybrid, mamba = capacity.swa > 0, generation.caches_mamba_states(tree)
    parts = hybrid or mamba
    holding = sum(holds_kv(req) for req in live_requests(scheduler)) + generation.session_records_holding_kv(tree)
    return wire.KvEvidence(
        flush_epoch=own.flush_epoch,
        flush_refused=own.flush_refused,
        last_refusal=own.last_refusal,
        paused=bool(scheduler._engine_paused),
        pauses=own.pauses,
        pause_mode=own.pause_mode,
        in_flight_at_pause=own.in_flight_at_pause,
        retracted_at_pause=own.retracted_at_pause,
        tokens_at_pause=own.tokens_at_pause,
        swept_epoch=own.swept_epoch,
        swept_tokens=own.swept_tokens,
        tree_full_evictable=int(tree.full_evictable_size() if parts else tree.evictable_size()),
        tree_full_protected=int(tree.full_protected_size() if parts else tree.protected_size()),
        tree_swa_evictable=int(tree.swa_evictable_size()) if hybrid else 0,
        tree_swa_protected=int(tree.swa_protected_size()) if hybrid else 0,
        full_free=free.full,
        full_capacity=capacity.full,
        swa_free=free.swa,
        swa_capacity=capacity.swa,
        request_rows_free=free.rows,
        request_rows_capacity=capacity.rows,
        requests_holding_kv=int(holding),
        waiting=len(scheduler.waiting_queue),
        running=len(scheduler.running_batch.reqs),
        chunked=int(scheduler.chunked_req is not None),
        result_queue=len(getattr(scheduler, "result_queue", None) or ()),
        # Every loop of SGLang that launches a batch counts it here (`run_batch`; the MLX loop by itself).
        forward_passes=int(scheduler.forward_ct),
        device_waits=device_fence.waits,
        device_waits_failed=device_fence.failed,
        image_features=image_features.count(scheduler),
        grammar_queue=len(scheduler.grammar_manager.grammar_queue),
        tree=pools.tree_name(tree),
        tree_mamba_evictable=int(tree.mamba_evictable_size()) if mamba else 0,
        tree_mamba_protected=int(tree.mamba_protected_size()) if mamba else 0,
        mamba_free=free.mamba,
        mamba_capacity=capacity.mamba,
    )


def _after_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Add the route, in the process of SGLang's HTTP server; nothing where there is none (the Python engine)."""
    server = sys.modules.get(SERVER)
    if server is None:
        return
    from fastapi import Response
    from sglang.srt.managers.io_struct import GetInternalStateReq

    async def reports() -> Any:
        manager.auto_create_handle_loop()
        # As TokenizerManager.get_internal_state asks (tokenizer_control_mixin.py:967).
        answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=REPORT_ONLY))
        found = [answer.internal_state[wire.REPORT_KEY] for answer in answers]
        for report in found:
            report.get("hooks", {}).update(
                {name: f"{wire.FAILED}the HTTP process: {why}" for name, why in registry.faults().items()}
            )
        # Written here: FastAPI would first go through every value, for longer than the rest of this takes.
        return Response(json.dumps(found), media_type="application/json")

    server.app.add_api_route(wire.REPORTS_PATH, reports, methods=["GET"], response_model=None)


def _around_internal_state(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    if recv_req.rid == REPORT_ONLY:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        output = GetInternalStateReqOutput(internal_state={})
    else:
        output = original(scheduler, recv_req, *args, **kwargs)
    output.internal_state[wire.REPORT_KEY] = _report(scheduler)
    return output


def _report(scheduler: Any) -> dict[str, Any]:
    """This rank's report, with those of the ranks that it answers for."""
    own = _own_report(scheduler)
    others = tensor_ranks.RANKS.share("report", own, GATHER_S)
    if "error" in own:
        return own
    own["missing_ranks"] = {}
    for rank, other in others.items():
        if isinstance(other, str):
            own["missing_ranks"][str(rank)] = other
        elif "error" in other:
            own["missing_ranks"][str(rank)] = other["error"]
        else:
            own["tensor_ranks"].append(other)
    return own


def _own_report(scheduler: Any) -> dict[str, Any]:
    try:
        return wire.SchedulerReport(
            instance_id=counters().instance_id,
            hooks=registry.statuses(),
            epoch=EPOCH.number,
            kv=evidence(scheduler),
            loads=wire.Loads(*astuple(loads.LOADS)),
            tensor_rank=tensor_ranks.RANKS.place.rank,
            tensor_size=tensor_ranks.RANKS.place.size,
        ).to_json()
    except Exception as error:  # a cache type we can't count must not end the scheduler; the reader refuses this form
        log.exception("reef-slime: no evidence from this scheduler")
        faults = "".join(f"; hook {hook} {why}" for hook, why in registry.faults().items())
        return {"error": f"{type(error).__name__}: {error}{faults}"}


def _around_flush(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    flushed = bool(original(scheduler, *args, **kwargs))
    own = counters()
    if flushed:
        own.flush_epoch += 1
    else:
        own.flush_refused += 1
        own.last_refusal = _refusal(scheduler)  # a refusal changes nothing, so this is what was seen
    return flushed


def _refusal(scheduler: Any) -> dict[str, Any]:
    """What Scheduler.is_fully_idle (0.5.23, scheduler.py:5337) looks at, so a refusal can be explained."""
    last_batch = scheduler.last_batch
    return {
        "paused": bool(scheduler._engine_paused),
        "pause_mode": counters().pause_mode,
        "requests_holding_kv": sum(holds_kv(req) for req in live_requests(scheduler)),
        "waiting": len(scheduler.waiting_queue),
        "running": len(scheduler.running_batch.reqs),
        "chunked": int(scheduler.chunked_req is not None),
        "result_queue": len(getattr(scheduler, "result_queue", None) or ()),
        "last_batch": 0 if last_batch is None else len(last_batch.reqs),
        "grammar_queue": len(scheduler.grammar_manager.grammar_queue),
    }


def _around_pause(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    before = [(req, generation.committed_length(req) if holds_kv(req) else 0) for req in live_requests(scheduler)]
    result = original(scheduler, recv_req, *args, **kwargs)
    # A request that finished while the pause read back its last step lost its KV too, but not to the pause.
    taken = [tokens for req, tokens in before if tokens and not holds_kv(req) and not req.finished()]
    own = counters()
    own.pauses += 1
    own.pause_mode = str(recv_req.mode)
    own.in_flight_at_pause = sum(not req.finished() for req, _ in before)
    own.retracted_at_pause = len(taken)
    own.tokens_at_pause = sum(taken)
    return result


def _around_continue(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(scheduler, *args, **kwargs)
    counters().pause_mode = None
    return result
