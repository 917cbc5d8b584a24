"""What the engines can store of a request's sampling values: one table for every API.

SGLang's own check (0.5.23, srt/sampling/sampling_params.py `verify`) leaves values through that its scheduler can't
store afterwards; the scheduler raises there, and the engine ends. So each value is compared with the type that holds it
(srt/sampling/sampling_batch_info.py, srt/sampling/penaltylib/):

    float32     temperature, top_p, min_p and the penalties: what is 0 in float32 although it isn't is refused too
    int32       top_k, min_new_tokens
    int64       sampling_seed, and every number of custom_params (msgpack, between SGLang's processes)
    token ids   stop_token_ids: an index into a row of the vocabulary where min_new_tokens is set
    text        regex, ebnf, json_schema: bounded in length, in depth and in what their repetitions unfold to, because a
                grammar is compiled in the scheduler's process

A value outside of it is an ApiError 400 that names the field as its API calls it, the value, and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from reef_service.data_plane.grammar_dead_ends import why_dead
from reef_service.data_plane.grammar_size import MOST_LENGTH, why_too_large
from reef_service.errors import bad_request
from slime_backend.provenance.sampling_params import GREEDY_BELOW

GRAMMARS = ("json_schema", "regex", "ebnf")
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT32_TINY = 2.0**-126  # the smallest normal one; CPUs and GPUs may take what is smaller for 0
MOST_TOKENS = 10_000_000
MOST_STOP_IDS = 64
MOST_PARAMS = 64  # entries of custom_params, and of each list or object in it
SHOWN = 60  # characters of a value in a message

# SGLang's names -> those of all APIs but its own.
_NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed", "max_new_tokens": "max_tokens"}
Check = Callable[[Any, int], Any]  # (value, size of the vocabulary) -> what is sent; ValueError where it isn't allowed


@dataclass(frozen=True, slots=True)
class Row:
    """One field: what it may be, in words and as a check."""

    allowed: str
    check: Check
    schema: Mapping[str, Any]  # of OpenAPI


def _number(low: float, high: float, *, above: bool = False, greedy: bool = False) -> Row:
    """A float32. `above`: the lower bound itself isn't allowed. `greedy`: what the engine takes for 0 is sent as 0."""

    def check(value: Any, vocabulary: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise ValueError
        return 0.0 if greedy and value < GREEDY_BELOW else value

    return Row(
        f"a number from {low:g} to {high:g}" if not above else f"a number above {low:g}, up to {high:g}",
        check,
        {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high},
    )


def _integer(low: int, high: int, *, but: tuple[int, ...] = (), words: str = "") -> Row:
    def check(value: Any, vocabulary: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high or value in but:
            raise ValueError
        return value

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Row(words or f"a whole number from {low} to {high}", check, schema)


def _token_ids() -> Row:
    def check(value: Any, vocabulary: int) -> list[int]:
        if not isinstance(value, list) or len(value) > MOST_STOP_IDS:
            raise ValueError
        if any(type(i) is not int or not 0 <= i < vocabulary for i in value):
            raise ValueError
        return value

    items = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
    schema = {"type": "array", "items": items, "maxItems": MOST_STOP_IDS}
    return Row(f"a list of at most {MOST_STOP_IDS} token ids of the model's vocabulary", check, schema)


def _flag() -> Row:
    def check(value: Any, vocabulary: int) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Row("true or false", check, {"type": "boolean"})


def _grammar(kind: str) -> Row:
    def check(value: Any, vocabulary: int) -> str:
        if not isinstance(value, str) or not _encodable(value):
            raise ValueError
        why = why_too_large(kind, value) or why_dead(kind, value)
        if why:
            raise ValueError(why)
        return value

    return Row(f"a text of at most {MOST_LENGTH[kind]} characters", check, {"type": "string"})


def _custom_params() -> Row:
    """Numbers, texts, and lists or objects of them: what SGLang's own type for it takes. Names of its private ones, by
    which its renderer talks to its scheduler, are nobody else's."""

    def scalar(value: Any) -> bool:
        if type(value) is int:
            return INT64_MIN <= value <= INT64_MAX
        if isinstance(value, float):
            return math.isfinite(value)
        return value is None or isinstance(value, bool) or (isinstance(value, str) and _encodable(value))

    def check(value: Any, vocabulary: int) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_PARAMS:
            raise ValueError
        for name, held in value.items():
            if name.startswith("__") or not _encodable(name):
                raise ValueError
            inner = held if isinstance(held, list) else list(held.values()) if isinstance(held, dict) else [held]
            if len(inner) > MOST_PARAMS or not all(scalar(item) for item in inner):
                raise ValueError
        if "thinking_budget" in value:
            _integer(0, INT32_MAX).check(value["thinking_budget"], vocabulary)
        return value

    return Row(
        f"an object of at most {MOST_PARAMS} numbers and texts, or lists and objects of these, without names that "
        "begin with __",
        check,
        {"type": "object"},
    )


def _encodable(text: str) -> bool:
    """Check that a text is UTF-8: half of a character is no text between SGLang's processes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


TABLE: Mapping[str, Row] = {
    "temperature": _number(0, 100, greedy=True),
    "top_p": _number(FLOAT32_TINY, 1),
    "top_k": _integer(-1, INT32_MAX, but=(0,), words=f"-1 (all), or a whole number from 1 to {INT32_MAX}"),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    # Logits are divided by it: by less, the largest of them leave float32 and become NaN.
    "repetition_penalty": _number(0.001, 2),
    "min_new_tokens": _integer(0, INT32_MAX),
    "max_new_tokens": _integer(1, MOST_TOKENS),
    "sampling_seed": _integer(INT64_MIN, INT64_MAX),
    "n": _integer(1, 1, words="1; send the request n times"),
    "ignore_eos": _flag(),
    "stop_token_ids": _token_ids(),
    "json_schema": _grammar("json_schema"),
    "regex": _grammar("regex"),
    "ebnf": _grammar("ebnf"),
    "custom_params": _custom_params(),
}


def checked(api: str, sampling: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """`sampling` (SGLang's names) as it may be sent. Raises ApiError 400. None stands for "not given" everywhere."""
    found = {}
    for name, value in sampling.items():
        if value is not None:
            found[name] = check(api, name, value, vocabulary)
    grammar = next((name for name in GRAMMARS if found.get(name)), None)
    if grammar is not None and found.get("min_new_tokens"):
        # The grammar may allow nothing but the end, which min_new_tokens forbids: no token is left (why_dead).
        least, called = field(api, "min_new_tokens"), field(api, grammar)
        raise bad_request(f"{least} can't be combined with {called}: together they may leave no token", least)
    return found


def check(api: str, name: str, value: Any, vocabulary: int = INT32_MAX) -> Any:
    """One value of the table. Raises ApiError 400; KeyError for what isn't in it, which a route must not pass on."""
    row = TABLE[name]
    try:
        return row.check(value, vocabulary)
    except (ValueError, OverflowError) as error:
        _refuse(field(api, name), value, row.allowed, str(error))


def field(api: str, name: str) -> str:
    """Return what an API calls SGLang's `name`."""
    return f"sampling_params.{name}" if api == "generate" else _NAMES.get(name, name)


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: SHOWN + 1]
    elif isinstance(value, list | dict) and len(value) > MOST_PARAMS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _refuse(name: str, value: Any, allowed: str, why: str) -> NoReturn:
    because = f" ({why})" if why else ""
    raise bad_request(f"{name}={shown(value)} is not allowed: it must be {allowed}{because}", name)
