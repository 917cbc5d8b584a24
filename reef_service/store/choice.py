"""Which branch of a session trains: one rollout is one sample, whatever else the agent asked in its session.

    1. never a branch that is marked as not to be trained on
    2. the branch that the score names (by a receipt); of several, the one that was named last
    3. a score of the session as one: the longest, counted in turns from the beginning of the conversation, then in
       tokens of its last prompt; of two that are equal (a retry), the later

A retry, a sub-agent, a request for a title are other branches of the session. The choice is made when scores come; it
stays where it is once the session is with a trainer. Where no groups are asked for, each branch that a score names is a
sample of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select, update

from reef_service.store.schema import trajectories


def choose_branch(connection: Connection, session: str) -> None:
    """Mark the branch of the session that trains."""
    t = trajectories.c
    rows = connection.execute(
        select(
            t.number, t.scored_at, t.train, t.named, t.trains, t.depth, t.prompt_tokens, t.lease, t.lease_ends,
            t.trained_at, t.closed_at,
        ).where(t.session == session)
    ).all()  # fmt: skip
    taken = [row for row in rows if is_taken(row)]
    if any(row.trains for row in taken):
        return
    number = branch_that_trains(taken or rows)
    for row in rows:
        if row.trains != (row.number == number):
            values: dict[str, Any] = {"trains": int(row.number == number)}
            if row.trains and not row.named:  # nobody may acknowledge what is no longer the session's sample
                values |= {"lease": None, "lease_ends": None}
            connection.execute(update(trajectories).where(t.session == session, t.number == row.number).values(values))


def branch_that_trains(rows: Sequence[Any]) -> int | None:
    """Return the number of the trajectory that trains, None where none does."""
    if any(row.closed_at is not None for row in rows):
        return None
    scored = [row for row in rows if row.scored_at is not None and row.train]
    named = [row for row in scored if row.named]
    if named:
        return int(max(named, key=lambda row: (row.scored_at, row.depth, row.number)).number)
    chosen = max(scored, key=lambda row: (row.depth, row.prompt_tokens, row.number), default=None)
    return None if chosen is None else int(chosen.number)


def is_taken(row: Any) -> bool:
    """Return whether a trainer has the trajectory, or has trained on it."""
    return row.trained_at is not None or (row.lease is not None and row.lease_ends > time.time())
