"""Adds values of a whole request to a finished response's `meta_info`, where SGLang adds values per token only.

Needed in 0.5.15.post1, whose streamer cuts every value of `req.customized_info` to the tokens that are sent
(scheduler_components/output_streamer.py:503); from 0.5.23 a subclass of the streamer does it (kv_spans.py). The values
travel in the same dictionary of one row per request, and the receiver extends one list over all rows of a request
(tokenizer_manager.py:1930), so each value is sent once, with the last row, and earlier rows are empty.

Not a hook by itself: the hooks that have something to say attach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import registry

ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
SLICE = "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info"

# Called with a finished request: key -> list of JSON objects.
Provider = Callable[[Any], Mapping[str, list[dict[str, Any]]]]

_providers: list[tuple[tuple[str, ...], Provider]] = []
_status: str | None = None


def install(hook: str, keys: Sequence[str], provider: Provider) -> str:
    """Send `provider`'s values for `keys`. Returns `wire.ACTIVE`, or which target this SGLang lacks."""
    global _status
    if _status != wire.ACTIVE:
        _status = registry.attach(hook, [(ACCEPT, "around", _around_accept), (SLICE, "around", around_slice(_keys))])
    if _status == wire.ACTIVE:
        _providers.append((tuple(keys), provider))
    return _status


def around_slice(keys_of: Callable[[], frozenset[str]]) -> Callable[..., None]:
    """AROUND the cut of a stream of increments at the chunk's offset: lists over segments are kept whole."""

    def cut(original: Any, meta_info: dict[Any, Any], offset: int, keys: Any = None) -> None:
        ours = keys_of()
        original(meta_info, offset, None if keys is None else [key for key in keys if key not in ours])
        for key in meta_info.keys() & ours:
            # One list grows over all chunks of a request. Chunks that are sent together are joined, so each needs its
            # own copy, or the record would be in it once per chunk.
            meta_info[key] = list(meta_info[key])

    return cut


def _keys() -> frozenset[str]:
    return frozenset(key for keys, _ in _providers for key in keys)


def _around_accept(original: Any, rows: Any, *, req: Any) -> None:
    before = len(rows.rids)
    original(rows, req=req)
    if len(rows.rids) == before:  # nothing of this request is sent now
        return
    for keys, provider in _providers:
        values = provider(req) if req.finished() else {}
        for key in keys:
            column = rows.customized_info.setdefault(key, [])
            del column[before:]  # SGLang has filled up what it took for values per token
            column.extend([] for _ in range(before - len(column)))
            column.append(values.get(key, []))
