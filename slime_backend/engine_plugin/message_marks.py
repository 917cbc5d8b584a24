"""Learns from a chat template which tokens begin a message, and finds them in prompts. Pure: no SGLang.

An engine gets token ids, not messages, so the end of a system prompt must be seen in the ids. Templates mark messages
with special tokens, which plain text can't produce. A few conversations are rendered, equal but for their contents:

    <|im_start|> system \\n alpha  <|im_end|> \\n  <|im_start|> user \\n beta  <|im_end|> ...
    <|im_start|> system \\n 7 sev  <|im_end|> \\n  <|im_start|> user \\n 9 ni  <|im_end|> ...
    `---- mark: equal in all -----'               `---- mark ----------'

Cut before each special token, a piece that is equal in all renderings is decoration; one that differs holds a
content, and what its renderings begin with in common is the mark of that kind of message. A message begins behind its
mark: the prompts that diverge there share the mark too.

Where a template puts no special token between two contents (system prompt and first question in one turn; tool
schemas behind the system prompt in one message) there is no boundary between them. Without a template, or with one that
doesn't render, there are no marks at all.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

Mark = tuple[int, ...]

# First characters of different kinds: a tokenizer that joins the content's first piece to the mark can't hide it in
# all of them.
CONTENTS = (
    ("alpha beta", "gamma delta", "omega psi", "kappa tau"),
    ("7 seven 5", "9 nine 3", "4 four 6", "2 two 8"),
    ("Zeta: Eta", "(Theta) Iota", "Mu, Nu", "Xi - Pi"),
)


def learn_marks(tokenizer: Any) -> tuple[Mark, ...]:
    """The marks of `tokenizer`'s chat template, the longest first; () where it has none that differ from text."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return ()
    special = frozenset(int(token) for token in getattr(tokenizer, "all_special_ids", ())) | _added_special(tokenizer)
    found: set[Mark] = set()
    decoration: set[int] = set()
    for conversation, tools in (
        (_with_system, False),
        (_with_system, True),
        (_with_tool_answer, True),
        (_plain, False),
    ):
        renderings = [_render(tokenizer, conversation(c), c[3] if tools else None) for c in CONTENTS]
        marks, others = _marks_of(renderings, special)
        found |= marks
        decoration |= others
    # A content that begins with a line break may be one token with the mark's own: then the special token must do,
    # if it begins nothing but messages.
    found |= {mark[:1] for mark in found if mark[0] not in decoration}
    return tuple(sorted(found, key=lambda mark: (-len(mark), mark)))


def boundaries(ids: Sequence[int], marks: Sequence[Mark]) -> list[int]:
    """Positions behind each mark in `ids`, ascending: where messages begin."""
    if not marks or len(ids) == 0:
        return []
    # SGLang's ids are an array("q"), which numpy reads in place: microseconds instead of a walk in Python.
    if isinstance(ids, array) and ids.typecode == "q":
        row = np.frombuffer(ids, dtype=np.int64)
    else:
        row = np.asarray(ids, dtype=np.int64)
    found: set[int] = set()
    for first in {mark[0] for mark in marks}:
        for start in np.flatnonzero(row == first).tolist():
            for mark in marks:  # the longest first
                end = start + len(mark)
                if mark[0] == first and end <= len(row) and tuple(row[start:end].tolist()) == mark:
                    found.add(end)
                    break
    return sorted(found)


def _with_system(c: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": c[0]}, *_plain(c)]


def _plain(c: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": c[1]},
        {"role": "assistant", "content": c[2]},
        {"role": "user", "content": c[3]},
    ]


def _with_tool_answer(c: Sequence[str]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": c[3]}}, "id": "abcdefghi"}
    return [
        {"role": "user", "content": c[1]},
        {"role": "assistant", "content": c[2], "tool_calls": [call]},
        {"role": "tool", "content": c[3], "name": "look", "tool_call_id": "abcdefghi"},
        {"role": "user", "content": c[0]},
    ]


def _tool(description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"where": {"type": "string", "description": description}}}
    return {
        "type": "function",
        "function": {"name": "look", "description": description, "parameters": parameters},
    }


def _render(tokenizer: Any, messages: list[dict[str, Any]], tool: str | None) -> list[int] | None:
    options = {} if tool is None else {"tools": [_tool(tool)]}
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return [int(token) for token in ids]
    except Exception as error:  # a template is a program of its maker's: it may refuse a role, or tools, in any way
        log.debug("a chat template doesn't render a conversation: %s", error)
        return None


def _added_special(tokenizer: Any) -> frozenset[int]:
    """Special tokens that the tokenizer knows without naming them (`<|im_start|>` in many models)."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset(int(token) for token, added in decoder.items() if getattr(added, "special", False))


def _marks_of(renderings: list[list[int] | None], special: frozenset[int]) -> tuple[set[Mark], set[int]]:
    """What the content pieces of equal conversations begin with, and the special tokens that begin other pieces."""
    pieces = [_pieces(ids, special) for ids in renderings if ids is not None]
    if len(pieces) < len(renderings) or len({tuple(p[0] for p in row) for row in pieces}) != 1:
        return set(), set()  # contents changed the structure: nothing to be learnt
    columns = list(zip(*pieces, strict=True))
    marks = {_common_start(column) for column in columns if len(set(column)) > 1}
    return marks, {column[0][0] for column in columns if len(set(column)) == 1}


def _common_start(pieces: Sequence[Mark]) -> Mark:
    first, last = min(pieces), max(pieces)  # what these two begin with, all between begin with
    same = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]


def _pieces(ids: Sequence[int], special: frozenset[int]) -> list[Mark]:
    """`ids` cut before each special token. What stands before the first one is left out."""
    starts = [i for i, token in enumerate(ids) if token in special]
    return [tuple(ids[start:end]) for start, end in itertools.pairwise([*starts, len(ids)])]


def load_marks(load: Callable[[], Any]) -> tuple[Mark, ...]:
    """The marks of the tokenizer that `load` returns; () and a line in the log where it can't be loaded."""
    try:
        return learn_marks(load())
    except Exception as error:  # an engine may serve a model without any tokenizer; hints and the grid remain
        log.info("reef-slime: no message boundaries: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return ()
