"""Which positions of a prompt become anchors. Pure: no SGLang, no state.

An anchor is a prompt position at which one sliding window of KV is kept, so that a later prompt that diverges there
finds it. Three sources, in this order:

    hint       `custom_params["kv_anchors"]` of the request: the caller knows where its prompts diverge
    boundary   where a message begins, seen in the prompt's tokens by the marks of the chat template (message_marks.py)
    grid       multiples of one step, for prompts that diverge where neither of the two says so

A request has at most MAX_ANCHORS. Each costs one window of the sliding-window pool until it is evicted, so guesses are
few: a long conversation keeps its first and last boundaries, and the grid takes at most 1/GRID_SHARE of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_plugin.guard import Refused
from slime_backend.engine_plugin.message_marks import Mark, boundaries
from slime_backend.wire import ANCHORS_KEY

MAX_ANCHORS = 16
# Branches happen behind the system prompt (and the tools, a message of their own in some templates), and behind the
# last turns (a retry, another sample, reasoning that was dropped).
FIRST_BOUNDARIES = 3
LAST_BOUNDARIES = 4
MIN_BOUNDARY = 32  # the first message begins some tokens in; to compute those again costs less than to look them up
MAX_GRID = 4
MIN_GRID_STEP = 1024
# A guess must not push out what others asked to keep: at 6000 slots and a window of 128 there is no grid at all.
GRID_SHARE = 64


class AnchorError(Refused):
    """The hint is not a list of integers. A ValueError, which SGLang answers with HTTP 400."""


def hint(custom_params: Any) -> list[int]:
    """The request's own anchors as they came. Raises AnchorError for anything but a list of integers (no booleans)."""
    if not isinstance(custom_params, Mapping):
        return []
    value = custom_params.get(ANCHORS_KEY)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise AnchorError(f"{ANCHORS_KEY} must be a list of token positions, got {type(value).__name__}")
    for position, item in enumerate(value):
        if type(item) is not int:  # a boolean is an int to isinstance
            raise AnchorError(
                f"{ANCHORS_KEY}[{position}] must be an integer (a token position), got {type(item).__name__}"
            )
    return list(value)


def clip(anchors: Iterable[int], length: int, page: int = 1) -> list[int]:
    """The first MAX_ANCHORS of `anchors` that lie inside a prompt of `length` tokens, in whole pages, each once.

    The order is kept: what a caller names first is what it wants most.
    """
    kept: dict[int, None] = {}
    for anchor in anchors:
        if 0 < anchor < length and (floored := anchor // page * page) > 0:
            kept[floored] = None
            if len(kept) == MAX_ANCHORS:
                break
    return list(kept)


def grid(length: int, limit: int) -> list[int]:
    """At most `limit` multiples of one step inside a prompt of `length` tokens.

    The step doubles with the length, so prompts of similar length share their positions.
    """
    if limit <= 0:
        return []
    step = MIN_GRID_STEP
    while (length - 1) // step > limit:
        step *= 2
    return list(range(step, length, step))


def grid_limit(pool: int, window: int) -> int:
    """How many windows a request's grid may take of a sliding-window pool of `pool` slots."""
    return min(MAX_GRID, pool // (GRID_SHARE * max(1, window)))


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses the anchors of each request of one engine."""

    marks: tuple[Mark, ...] = ()
    grid_limit: int = 0
    page: int = 1

    def plan(self, ids: Sequence[int], custom_params: Any) -> tuple[int, ...]:
        """Anchors of a prompt, ascending, in whole pages. A malformed hint counts as none: see `hint`."""
        try:
            asked = hint(custom_params)
        except AnchorError:
            asked = []  # the HTTP process refuses it; a request that came another way must not end the scheduler
        found = []
        if len(ids) > MIN_BOUNDARY:
            found = [position for position in boundaries(ids, self.marks) if position >= MIN_BOUNDARY]
        if len(found) > FIRST_BOUNDARIES + LAST_BOUNDARIES:
            found = found[:FIRST_BOUNDARIES] + found[-LAST_BOUNDARIES:]
        wanted = (*asked, *found, *grid(len(ids), self.grid_limit))
        return tuple(sorted(clip(wanted, len(ids), self.page)))
