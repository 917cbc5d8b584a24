"""What is stored of a generation: its record, how complete its provenance is, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from reef_service.data_plane.generation import Generation
from reef_service.store.turns import TurnState
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import transforming
from slime_backend.wire import KV_PROVENANCE_KEY, PREFILLS_KEY, SAMPLED_SPANS_KEY


def record_of(generation: Generation, *, session: str, label: str, temperature: float) -> RolloutRecord:
    """The record of a finished generation. Raises RecordError where the engine's answer lacks provenance."""
    count = len(generation.output_ids)
    meta = {**generation.meta, **clip(generation.meta, len(generation.prompt_ids), count)}
    if generation.spliced or not count:
        meta |= {SAMPLED_SPANS_KEY: [], KV_PROVENANCE_KEY: [], PREFILLS_KEY: []}
    meta["output_token_logprobs"] = [(value,) for value in generation.logprobs]
    return RolloutRecord.from_answer(
        {"output_ids": generation.output_ids, "meta_info": meta},
        receipt=generation.receipt,
        group=label or session,
        engine=generation.engine,
        question="",
        prompt_ids=generation.prompt_ids,
        temperature=temperature,
        reward=0.0,
        submitted_at=generation.submitted_at,
        attempts=max(1, generation.attempts),
        session=session,
        sampling=generation.sampling,
    )


def record_without_answer(
    generation: Generation, *, session: str, label: str, temperature: float, reason: str
) -> RolloutRecord:
    """Record a request whose engine never finished its answer: the tokens so far, without provenance."""
    return RolloutRecord(
        receipt=generation.receipt,
        group=label or session,
        engine=generation.engine,
        question="",
        prompt_ids=tuple(generation.prompt_ids),
        output_ids=tuple(generation.output_ids),
        logprobs=tuple(generation.logprobs),
        temperature=temperature,
        reward=0.0,
        finish_reason=reason,
        spans=(),
        segments=(),
        prefills=(),
        submitted_at=generation.submitted_at,
        finished_at=time.time(),
        attempts=max(1, generation.attempts),
        session=session,
        sampling=transforming(generation.sampling),
    )


def state_of(generation: Generation, *, abandoned: bool) -> TurnState:
    if abandoned:
        return "disconnected"
    return "spliced" if generation.spliced else "complete"


def clip(meta: Mapping[str, Any], prompt: int, count: int) -> dict[str, list[dict[str, Any]]]:
    """Spans and segments over the first `count` output tokens: what comes after a stop text isn't in the answer."""
    if not all(isinstance(meta.get(key), list) for key in (SAMPLED_SPANS_KEY, KV_PROVENANCE_KEY)):
        return {}  # the record names what is missing
    segments = [
        {
            **segment,
            "end": (end := min(segment["end"], count)),
            **{
                name: _clipped(segment[name], prompt + end - 1)
                for name in ("context", "measured_context")
                if name in segment
            },
        }
        for segment in meta[KV_PROVENANCE_KEY]
        if segment["start"] < count
    ]
    return {SAMPLED_SPANS_KEY: _clipped(meta[SAMPLED_SPANS_KEY], count), KV_PROVENANCE_KEY: segments}


def _clipped(spans: list[dict[str, Any]], end: int) -> list[dict[str, Any]]:
    return [{**span, "end": min(span["end"], end)} for span in spans if span["start"] < end]
