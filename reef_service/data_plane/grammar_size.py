"""How large a grammar is before anybody compiles it: its length, its depth, what its repetitions unfold to.

    (a{1,1000}){1,1000}    11 characters, a million states

A grammar is compiled in the scheduler's process, by native code that recurses over it; one that is too deep ends the
engine, and one that is too large keeps it from everything else. Counted here without recursion, on the safe side.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_LENGTH = {"regex": 4096, "ebnf": 16384, "json_schema": 65536}  # characters
MOST_DEPTH, MOST_NESTED = 32, 64  # of brackets; of a schema: two for each object in it
MOST_UNFOLDED = 20_000  # places, repetitions written out
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


def why_too_large(kind: str, text: str) -> str:
    """Return why a grammar of this kind isn't passed on; "" if it may be."""
    if len(text) > MOST_LENGTH[kind]:
        return f"it has {len(text)}"
    if kind == "json_schema":
        return _schema(text)
    return pattern(text)


def pattern(text: str) -> str:
    """Of a regular expression, or a grammar in EBNF: both write groups and repetitions alike."""
    totals, last = [0], 0  # places of each open group; of what a repetition would repeat
    at = 0
    quoted = ""  # inside of a character class, or of a text of EBNF
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
            totals[-1], last = totals[-1] + 1, 1
        elif quoted:
            quoted = "" if letter == quoted else quoted
        elif letter == "[":
            quoted, last = "]", 1
            totals[-1] += 1
        elif letter == "(":
            totals.append(0)
            if len(totals) > MOST_DEPTH:
                return f"it has more than {MOST_DEPTH} groups inside of each other"
        elif letter == ")" and len(totals) > 1:
            last = max(1, totals.pop())
            totals[-1] += last
        elif letter == "{" and (found := _REPEAT.match(text, at)):
            digits = max((g for g in found.groups() if g), key=len, default="0")
            times = int(digits) if len(digits) < 8 else MOST_UNFOLDED + 1
            totals[-1] += last * max(0, times - 1)
            last *= max(1, times)
            at = found.end() - 1
        else:
            totals[-1], last = totals[-1] + 1, 1
        if totals[-1] > MOST_UNFOLDED or last > MOST_UNFOLDED:
            return f"its repetitions unfold to more than {MOST_UNFOLDED} places"
        at += 1
    return ""


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return "it is no JSON, or nested too deeply"
    if not isinstance(schema, dict | bool):
        return "it is no JSON schema"
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        value, depth = left.pop()
        if depth > MOST_NESTED:
            return f"it is nested more than {MOST_NESTED} deep"
        if isinstance(value, dict):
            why = _counts(value)
            if why:
                return why
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]
    return ""


def _counts(schema: dict[str, Any]) -> str:
    for name in _COUNTS:
        value = schema.get(name)
        if isinstance(value, int | float) and not 0 <= value <= MOST_UNFOLDED:
            return f"its {name} is not from 0 to {MOST_UNFOLDED}"
    found = schema.get("pattern")
    if isinstance(found, str) and len(found) > MOST_LENGTH["regex"]:
        return f"it has a pattern of {len(found)} characters, more than {MOST_LENGTH['regex']}"
    return pattern(found) if isinstance(found, str) else ""
