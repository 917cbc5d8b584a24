"""Says in meta_info which weights sampled each output token: `weight_versions`, as SGLang does from 0.5.19.

Needed up to 0.5.18, whose response bears one `weight_version`: the label at the moment it was sent (0.5.15.post1,
managers/tokenizer_manager.py:1893), which a request that lived through a publication claims for every token.

At each weight mutation the tokens that a request has sampled so far are noted against the epoch that ends, those under
way included (kv_spans.py, `sampled_tokens`). Spans of one name are one span. They come with the last chunk of a stream,
where SGLang from 0.5.19 on gives those so far with every chunk.
"""

from __future__ import annotations

import weakref
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import egress, epoch, generation, registry
from slime_backend.engine_plugin.epoch import EPOCH
from slime_backend.engine_plugin.generation import BATCH, REQ
from slime_backend.engine_plugin.kv_spans import NO_OUTPUT, PREFILL, SAMPLED_USES, sampled_tokens
from slime_backend.engine_plugin.names import IMPORTED, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "sampled_spans"
USES = (f"{BATCH}.reqs", f"{REQ}.output_ids_through_stop", *SAMPLED_USES)

# Request -> (epoch that ended, output tokens sampled until then). Weak: SGLang may drop a request without finishing it.
_marks: weakref.WeakKeyDictionary[Any, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


def install() -> str:
    status = registry.install(HOOK, plan(IMPORTED))
    if status == wire.ACTIVE:
        egress.provide([wire.SAMPLED_SPANS_KEY], _spans_of)
        EPOCH.on_end(_on_epoch_end, HOOK)
    return status


def plan(sglang: Sglang) -> Plan:
    if generation.reports_sampled_spans(sglang):
        return Plan(instead=wire.NOT_NEEDED)
    if generation.serves_by_rust(sglang):
        return Plan(instead=NO_OUTPUT)
    return epoch.plan(sglang) + egress.plan() + Plan(((PREFILL, "before", _before_prefill),), USES)


def spans(marks: list[tuple[int, int]], sampled: int) -> list[wire.Span]:
    """Spans over output tokens 0 .. `sampled`; the tokens after the last mark are of the current epoch."""
    found: list[wire.Span] = []
    start = 0
    for number, end in (*marks, (EPOCH.number, sampled)):
        end = min(end, sampled)
        if end <= start:
            continue
        version = EPOCH.version(number)
        if found and found[-1].version == version:
            start = found.pop().start
        found.append(wire.Span(version, start, end))
        start = end
    return found


def _before_prefill(batch: Any, *args: Any, **kwargs: Any) -> None:
    for req in batch.reqs:
        marks = _marks.setdefault(req, [])
        # SGLang drops the tokens of a retracted request with input embeddings.
        marks[:] = [(number, min(count, len(req.output_ids))) for number, count in marks]


def _on_epoch_end(scheduler: Any, ending: int) -> None:
    for req, marks in list(_marks.items()):
        marks.append((ending, sampled_tokens(req)))


def _spans_of(req: Any) -> dict[str, list[dict[str, Any]]]:
    found = spans(_marks.pop(req, []), len(req.output_ids_through_stop))
    return {wire.SAMPLED_SPANS_KEY: [span.to_json() for span in found]}
