"""Says in meta_info which weights sampled each token, which computed the KV it came from, and what each prefill reused.

Adds `kv_provenance` and `prefills` to a finished response. Works with SGLang 0.5.15.post1 to 0.5.23 (the lines below)
and is needed in each of them: `weight_versions` (native from 0.5.19; 0.5.23, managers/scheduler.py:5636) tells who
sampled a token, not under which weights its context was computed, and `cached_tokens` of a retracted request stays what
its first prefill found (schedule_batch.py:2965).

Emitted through SGLang's own extension point (output_streamer.py:235-270, a subclass returned by
Scheduler.get_output_streamer_class). It refuses a request-level value to the Rust egress (:98), so there this hook is
inactive. A stream of increments cuts every such value at the chunk's offset (tokenizer_manager.py:364); ours are lists
over segments, not tokens, and are kept whole. Up to 0.5.18 there is no such point: there egress.py emits them.

Also corrects one native count, where it exists: with the overlap schedule a token that is sampled but not yet read
back at an in-place publication is credited to the new version (scheduler.py:5636 counts `output_ids`, which trail the
forward by one).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import egress, epoch, generation, guard, registry
from slime_backend.engine_plugin.epoch import EPOCH
from slime_backend.engine_plugin.generation import BATCH, REQ, SCHEDULER, holds_kv
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan
from slime_backend.engine_plugin.trace import Admission, RequestTrace

HOOK = "kv_spans"
KEYS = (wire.KV_PROVENANCE_KEY, wire.PREFILLS_KEY)

PREFILL = f"{BATCH}.prepare_for_extend"
STREAMER = f"{SCHEDULER}.get_output_streamer_class"
RELABEL = f"{SCHEDULER}.record_weight_version_change"
STREAMER_CLASS = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
NO_OUTPUT = "the Rust server (SGLANG_RUST_SERVER) takes no additional output"

SAMPLED_USES: tuple[Need, ...] = (f"{REQ}.output_ids", f"{REQ}.origin_input_ids", *generation.KV_USES)
USES: tuple[Need, ...] = (
    f"{BATCH}.reqs",
    f"{REQ}.rid",
    f"{REQ}.full_untruncated_fill_ids",
    f"{REQ}.output_ids_through_stop",
    f"{REQ}.finished",
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
    *SAMPLED_USES,
    *generation.PREFIX_USES,
)
STREAMER_USES: tuple[Need, ...] = (
    f"{SCHEDULER}.rust_server",
    f"{STREAMER_CLASS}.has_additional_customized_info",
    f"{STREAMER_CLASS}.build_additional_customized_info",
    f"{REQ}.weight_version_events",
    "sglang.srt.utils.weight_versions.WeightVersionEvent",
)

# Called before the values of finished requests are made: what is measured has to be read by then (kv_stamps.py).
BEFORE_REPORT: list[Callable[[], None]] = []
KEPT_NAMES = 64  # of epochs that no request names, for slots that were written long ago
# Requests that were admitted and have not been reported yet. Weak: SGLang may drop a request without finishing it.
_traces: weakref.WeakKeyDictionary[Any, RequestTrace] = weakref.WeakKeyDictionary()


def install() -> str:
    """Attach; active once the scheduler has built its output streamer."""
    status = registry.install(HOOK, plan(IMPORTED))
    if status != wire.ACTIVE:
        return status
    EPOCH.on_end(_on_epoch_end, HOOK)
    if generation.has_streamer_extension():
        return "this process has built no output streamer"
    egress.provide(KEYS, _values_of)
    return status


def plan(sglang: Sglang) -> Plan:
    shared = epoch.plan(sglang) + Plan(((PREFILL, "before", _before_prefill),), USES)
    if generation.serves_by_rust(sglang):
        return Plan(instead=NO_OUTPUT)
    if not generation.has_streamer_extension(sglang):
        return shared + egress.plan()
    functions: tuple[registry.HookFunction, ...] = (
        (STREAMER, "after", _streamer_class),
        (RELABEL, "around", _around_relabel),
        (egress.SLICE, "around", _around_slice),
    )
    return shared + Plan(functions, STREAMER_USES)


_around_slice = egress.around_slice(lambda: frozenset(KEYS))


def sampled_tokens(req: Any) -> int:
    """Output tokens of `req` that were sampled, read back or not.

    KV of prompt + n positions is written by the pass that samples output token n + 1, and is counted when that pass is
    launched (mem_cache/allocation.py:484 and :685); `output_ids` grow one pass later under the overlap schedule.
    """
    known = len(req.output_ids)
    if not holds_kv(req):
        return known
    return max(known, generation.committed_length(req) - len(req.origin_input_ids) + 1)


def _before_prefill(batch: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    for req in batch.reqs:
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            continue  # a /health between a publication and its first rollout must not take that rollout's order 0
        trace = _traces.get(req)
        if trace is not None and holds_kv(req):
            continue  # a later chunk of a prefill that is already counted
        if trace is None:
            trace = _traces[req] = RequestTrace(prompt_length=len(req.origin_input_ids))
        admission = Admission(
            epoch=EPOCH.number,
            order=EPOCH.next_order(),
            cached=generation.prefix_length(req),
            total=len(req.full_untruncated_fill_ids),
        )
        trace.admit(admission, sampled=len(req.output_ids))


def _on_epoch_end(scheduler: Any, ending: int) -> None:
    for req, trace in list(_traces.items()):
        committed = generation.committed_length(req) if holds_kv(req) else None
        trace.publish(ending, committed, sampled_tokens(req))
    EPOCH.forget_before(min((trace.first_epoch for trace in _traces.values()), default=ending) - KEPT_NAMES)


def trace_of(req: Any) -> RequestTrace | None:
    """The record of a request that was admitted and hasn't been reported."""
    return _traces.get(req)


def _values_of(req: Any) -> dict[str, list[dict[str, Any]]]:
    """Our two values of a finished request; none if it was never admitted or has been reported."""
    trace = _traces.pop(req, None)
    if trace is None:
        return {}
    for read in BEFORE_REPORT:
        guard.attempt(read, report=_report_unread, otherwise=None)
    output = len(req.output_ids_through_stop)
    segments = trace.kv_segments(EPOCH.number, output, EPOCH.version, EPOCH.name_if_known)
    return {
        wire.KV_PROVENANCE_KEY: [segment.to_json() for segment in segments],
        wire.PREFILLS_KEY: [prefill.to_json() for prefill in trace.prefills(EPOCH.version)],
    }


def _report(reqs: list[Any]) -> dict[str, list[list[dict[str, Any]]]]:
    """Values for `build_additional_customized_info`: one list per request, empty before the last chunk.

    The receiver extends one list over all chunks of a request, so each value must be sent once. A step at whose end
    nobody has finished sends no columns at all: with streams that is nearly every step.
    """
    if not any(req.finished() for req in reqs):
        return {}
    values = [_values_of(req) if req.finished() else {} for req in reqs]
    return {key: [row.get(key, []) for row in values] for key in KEYS}


def _streamer_class(cls: type, scheduler: Any) -> type:
    """AFTER Scheduler.get_output_streamer_class, which runs once, when the scheduler is built."""
    if scheduler.rust_server is not None:
        registry.set_status(HOOK, NO_OUTPUT)
        return cls
    registry.set_status(HOOK, wire.ACTIVE)
    return reporting_streamer(cls)


def _report_unread(error: Exception) -> None:
    registry.report_fault(("kv_stamps",), "the reading of stamps", error)


def _report_fault(error: Exception) -> None:
    registry.report_fault((HOOK,), STREAMER_CLASS, error)


@functools.cache
def reporting_streamer(base: Any) -> type:
    """A subclass of SGLang's streamer, always the same one for the same base."""

    class ReportingStreamer(base):
        """Adds our two keys to what the base class emits."""

        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            own: dict[str, Any] = guard.attempt(_report, reqs, report=_report_fault, otherwise={})
            return {**base.build_additional_customized_info(self, reqs), **own}

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return key in KEYS or base.is_request_level_customized_info_key(self, key)

    return ReportingStreamer


def _around_relabel(original: Any, scheduler: Any, new_version: str | None) -> Any:
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    in_flight = [
        (req, len(req.weight_version_events)) for req in list(_traces) if sampled_tokens(req) > len(req.output_ids)
    ]
    old_version = EPOCH.version(EPOCH.number)
    result = original(scheduler, new_version)
    if old_version != EPOCH.version(EPOCH.number):
        for req, events_before in in_flight:
            del req.weight_version_events[events_before:]
            req.weight_version_events.append(WeightVersionEvent(old_version, sampled_tokens(req)))
    return result
