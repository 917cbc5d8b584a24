"""Turns of made conversations."""

from __future__ import annotations

from reef_service.store.turns import History, Turn
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Prefill, Span


def turn(
    receipt,
    *,
    session="s",
    prompt=(1, 2, 3),
    output=(7, 8),
    parent=None,
    state="complete",
    label="",
    versions=("v0",),
    history=None,
    at=1.0,
    train=True,
):
    """A turn whose output is sampled by `versions` in equal parts, each from KV of its own."""
    size, count = len(output), len(versions)
    bounds = [size * i // count for i in range(count + 1)]
    pieces = [(v, bounds[i], bounds[i + 1]) for i, v in enumerate(versions)]
    record = RolloutRecord(
        receipt=receipt,
        group=session,
        engine="engine0",
        question="",
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        logprobs=tuple(-0.25 * (i + 1) for i in range(size)),
        temperature=1.0,
        reward=0.0,
        finish_reason="stop",
        spans=tuple(Span(v, a, b) for v, a, b in pieces),
        segments=tuple(KvSegment(a, b, v, (Span(v, 0, len(prompt) + b - 1),)) for v, a, b in pieces),
        prefills=tuple(Prefill(i, 1, v, 0, len(prompt)) for i, (v, _, _) in enumerate(pieces)),
        submitted_at=at,
        finished_at=at + 0.5,
        session=session,
    )
    return Turn(record, parent, "chat", state, label, history or History("chat", 2, f"digest-{receipt}"), train)
