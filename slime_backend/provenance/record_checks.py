"""Checks what is read back as a rollout, and what an engine answers for one: types and keys, with the place named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slime_backend.provenance.errors import RecordError

_TEXTS = ("receipt", "group", "engine", "question", "finish_reason", "session")
_NUMBERS = ("temperature", "reward", "submitted_at", "finished_at")
_NUMERIC = frozenset((int, float))
_INTEGER = frozenset((int,))


def check_stored(data: Mapping[str, Any]) -> None:
    """Raise RecordError where a field of a stored rollout has the wrong type. Missing fields are the caller's."""
    for name in _TEXTS:
        if name in data and not _is_text(data[name]):
            raise RecordError(f"a stored rollout's {name} is {_short(data[name])}, not text")
    for name in _NUMBERS:
        if name in data and type(data[name]) not in _NUMERIC:
            raise RecordError(f"a stored rollout's {name} is {_short(data[name])}, not a number")
    if type(data.get("attempts", 1)) is not int:
        raise RecordError(f"a stored rollout's attempts is {_short(data['attempts'])}, not a whole number")
    for name, types in (("prompt_ids", _INTEGER), ("output_ids", _INTEGER), ("logprobs", _NUMERIC)):
        _check_list(data, name, types)
    for name in ("spans", "segments", "prefills"):
        for item in _objects(data.get(name, []), name):
            _check_span(item, name)
    for segment in data.get("segments", []):
        kept = segment.get("keep")
        if kept is not None and (type(kept) is not int or kept < 0):
            raise RecordError(f"a stored segment's keep is {_short(kept)}, not a count")
        for span in _objects(segment.get("context"), "context"):
            _check_span(span, "context")
        for span in _objects(segment.get("measured_context") or [], "measured_context"):
            _check_span(span, "measured_context")


def check_answer(meta: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raise RecordError where an answer's provenance has values of the wrong type. `keys`: in meta_info -> its kind."""
    for key, name in keys.items():
        for item in _objects(meta.get(key), name):
            _check_span(item, name)
            for span in _objects(item["context"], "context") if "context" in item else ():
                _check_span(span, "context")


def output_logprobs(answer: Mapping[str, Any], engine: str, receipt: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(output ids, log-probs) of an engine's answer.

    Raises RecordError, with engine, receipt and token, where one isn't a number: of NaN in the weights, or of an
    overflow in the forward pass.
    """
    where = f"{engine}: rollout {receipt}"
    ids = answer.get("output_ids")
    if not isinstance(ids, list | tuple):
        raise RecordError(f"{where}: the answer's output_ids are {_short(ids)}, not a list of tokens")
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise RecordError(f"{where}: output token {position} is {_short(token)}, not a token id")
    entries = answer["meta_info"].get("output_token_logprobs") or ()
    if not isinstance(entries, list | tuple):
        raise RecordError(f"{where}: output_token_logprobs is {_short(entries)}, not a list")
    if len(entries) != len(ids):
        raise RecordError(f"{where}: {len(entries)} log-probs for {len(ids)} tokens")
    found = tuple(entry[0] if isinstance(entry, list | tuple) and entry else entry for entry in entries)
    why = why_no_logprobs(found, answer["meta_info"])
    if why:
        raise RecordError(f"{where}: {why}")
    return tuple(ids), tuple(map(float, found))


def why_no_logprobs(values: Sequence[Any], meta: Mapping[str, Any], first: int = 0) -> str:
    """Why one of the values isn't a log-prob, or "" where all are. `first`: the output token of the first value.

    SGLang writes NaN and the infinities as null (orjson).
    """
    for position, value in enumerate(values, first):
        if type(value) not in _NUMERIC or not math.isfinite(value):
            version = version_at(meta, position)
            return (
                f"the log-prob of output token {position} is {_short(value)}"
                f" (NaN or an infinity: are there NaN in the weights of {version}?)"
            )
    return ""


def version_at(meta: Mapping[str, Any], position: int) -> str:
    """The version that sampled an output token, by the answer itself."""
    for span in meta.get("weight_versions") or ():
        if isinstance(span, Mapping) and _within(span, position):
            return str(span.get("version"))
    return str(meta.get("weight_version") or "an unknown version")


def _within(span: Mapping[str, Any], position: int) -> bool:
    start, end = span.get("start"), span.get("end")
    return isinstance(start, int) and isinstance(end, int) and start <= position < end


def _check_list(data: Mapping[str, Any], name: str, types: frozenset[type]) -> None:
    if name not in data:
        return
    values = data[name]
    if not isinstance(values, list | tuple):
        raise RecordError(f"a stored rollout's {name} is {_short(values)}, not a list")
    if not types.issuperset(map(type, values)):
        position, value = next((i, v) for i, v in enumerate(values) if type(v) not in types)
        raise RecordError(f"a stored rollout's {name} has {_short(value)} at {position}, not a number")


def _check_span(item: Mapping[str, Any], name: str) -> None:
    """Spans, segments, contexts and prefills: a version as text, all other plain values whole numbers."""
    if not _is_text(item.get("version")):
        raise RecordError(f"a rollout's {name} has the version {_short(item.get('version'))}, not text")
    for key in ("epoch", "order", "cached", "total") if name == "prefills" else ("start", "end"):
        if type(item.get(key)) is not int:
            raise RecordError(f"a rollout's {name} has the {key} {_short(item.get(key))}, not a whole number")


def _objects(values: Any, name: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(values, list | tuple) or not all(isinstance(v, Mapping) for v in values):
        raise RecordError(f"a rollout's {name} is {_short(values)}, not a list of objects")
    return values


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and nobody can store
        return False
    return True


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
