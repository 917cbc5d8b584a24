"""Adds values of a whole request to a finished response's `meta_info`, where SGLang adds values per token only.

Needed up to 0.5.18, whose streamer cuts every value of `req.customized_info` to the tokens that are sent
(0.5.15.post1, scheduler_components/output_streamer.py:503); from 0.5.19 a subclass of the streamer does it
(kv_spans.py). The values
travel in the same dictionary of one row per request, and the receiver extends one list over all rows of a request
(tokenizer_manager.py:1930), so each value is sent once, with the last row, and earlier rows are empty.

Not a hook by itself: the hooks that have something to report attach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_backend.engine_plugin import guard, registry
from slime_backend.engine_plugin.generation import REQ
from slime_backend.engine_plugin.names import Need
from slime_backend.engine_plugin.registry import Plan

ROWS = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
ACCEPT = f"{ROWS}.accept"
SLICE = "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info"

# Called with a finished request: key -> list of JSON objects.
Provider = Callable[[Any], Mapping[str, list[dict[str, Any]]]]

USES: tuple[Need, ...] = (f"{ROWS}.rids", f"{ROWS}.customized_info", f"{REQ}.finished")

_providers: list[tuple[tuple[str, ...], Provider]] = []


def plan() -> Plan:
    """What to attach; `provide` says which values."""
    return Plan(((ACCEPT, "around", _around_accept), (SLICE, "around", _around_slice)), USES)


def provide(keys: Sequence[str], provider: Provider) -> None:
    """Send `provider`'s values for `keys`, where `plan` is attached."""
    _providers.append((tuple(keys), provider))


def around_slice(keys_of: Callable[[], frozenset[str]]) -> Callable[..., None]:
    """AROUND the cut of a stream of increments at the chunk's offset: lists over segments are kept whole."""

    def cut(
        original: Any, meta_info: dict[Any, Any], last_output_offset: int, customized_info_keys: Any = None
    ) -> None:
        ours, keys = keys_of(), customized_info_keys
        # One list grows over all chunks of a request. Chunks that are sent together are joined, so each needs its own
        # copy, or the record would be in it once per chunk.
        kept = {key: list(meta_info[key]) for key in meta_info.keys() & ours}
        others = None if keys is None else [key for key in keys if key not in ours]
        original(meta_info, last_output_offset, others)
        meta_info.update(kept)

    return cut


def _keys() -> frozenset[str]:
    return frozenset(key for keys, _ in _providers for key in keys)


_around_slice = around_slice(_keys)


def _around_accept(original: Any, rows: Any, *, req: Any) -> None:
    before = len(rows.rids)
    original(rows, req=req)
    if len(rows.rids) == before:  # nothing of this request is sent now
        return
    for keys, provider in _providers:
        values: Mapping[str, Any] = {}
        if req.finished():
            values = guard.attempt(provider, req, report=_report, otherwise=values)
        for key in keys:
            column = rows.customized_info.setdefault(key, [])
            del column[before:]  # SGLang has filled up what it took for values per token
            column.extend([] for _ in range(before - len(column)))
            column.append(values.get(key, []))


def _report(error: Exception) -> None:
    """A record that can't be made is missing in one answer, whose columns are of one length all the same."""
    registry.report_fault(registry.hooks_at(ACCEPT), ACCEPT, error)
