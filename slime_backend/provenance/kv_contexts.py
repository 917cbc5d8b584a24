"""How KV segments are written to a line of the ledger: what two contexts begin with alike is written once.

A publication in place splits a rollout's context and leaves what stood before, so written out whole, the contexts of a
rollout grow with the square of the publications that it lived through. A stored segment says with `keep` how many spans
of the context before it stand before its own; without `keep` (each segment of an older ledger) its context is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_backend.provenance.errors import RecordError
from slime_backend.wire import KvSegment, Span

KEEP = "keep"


def shorten(segments: Iterable[KvSegment]) -> list[dict[str, Any]]:
    """As they are stored."""
    stored: list[dict[str, Any]] = []
    before: tuple[Span, ...] = ()
    for segment in segments:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, segment.context, strict=False))
        kept = sum(1 for _ in alike)
        item = replace(segment, context=segment.context[kept:]).to_json()
        stored.append({**item, KEEP: kept} if kept else item)
        before = segment.context
    return stored


def restore(stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stored segments with whole contexts, as an engine reports them.

    Raises RecordError where one keeps more spans than there are before it.
    """
    whole: list[dict[str, Any]] = []
    before: list[Any] = []
    for item in stored:
        kept = item.get(KEEP) or 0
        if kept > len(before):
            raise RecordError(f"a stored segment keeps {kept} spans of {len(before)}; its line is damaged")
        before = [*before[:kept], *item["context"]]
        whole.append({**{key: value for key, value in item.items() if key != KEEP}, "context": before})
    return whole


def read_segments(stored: Sequence[Mapping[str, Any]]) -> tuple[KvSegment, ...]:
    return tuple(KvSegment.from_json(segment) for segment in restore(stored))
