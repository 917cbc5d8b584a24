"""A session as somebody looks at it: its branches, their scores and turns, and which version sampled what."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import Connection, func, select

from reef_service.store.choice import is_taken
from reef_service.store.schema import trajectories, turns

MOST = 200  # turns and branches, the latest


def read_session(connection: Connection, name: str) -> dict[str, Any] | None:
    """Everything of a session, or of the session that a turn's receipt is in, without tokens; None where there is none.

    `turns` and `branches` are the latest `MOST`; `turns_stored` and `branches_stored` are how many there are.
    """
    t, b = turns.c, trajectories.c
    count = select(func.count()).select_from(turns)
    stored = connection.scalar(count.where(t.session == name))
    if not stored:
        session = connection.scalar(select(t.session).where(t.receipt == name))
        if session is None:
            return None
        name, stored = session, connection.scalar(count.where(t.session == session))
    columns = (
        t.receipt, t.trajectory, t.parent, t.api, t.state, t["class"], t.engine, t.submitted_at, t.finished_at,
        t.finish_reason, t.attempts, t.depth, t.provenance, (func.length(t.prompt_ids) / 4).label("prompt_tokens"),
        (func.length(t.output_ids) / 4).label("output_tokens"),
    )  # fmt: skip
    latest = select(*columns).where(t.session == name).order_by(t.submitted_at.desc(), t.receipt.desc()).limit(MOST)
    branches = select(trajectories).where(b.session == name).order_by(b.number.desc()).limit(MOST)
    return {
        "session": name,
        "turns_stored": stored,
        "branches_stored": connection.scalar(select(func.count()).select_from(trajectories).where(b.session == name)),
        "branches": [_branch(row) for row in reversed(connection.execute(branches).all())],
        "turns": [_turn(dict(row)) for row in reversed(connection.execute(latest).mappings().all())],
    }


def _branch(row: Any) -> dict[str, Any]:
    """`place`: what has become of it."""
    if row.trained_at is not None:
        place = "trained"
    elif row.closed_at is not None:
        place = "closed"
    elif is_taken(row):
        place = "leased"
    else:
        place = "open" if row.scored_at is None else "scored"
    return {
        "trajectory": row.number,
        "group": row.label,
        "turns": row.turns,
        "class": row._mapping["class"],
        "score": row.score,
        "scored_at": row.scored_at,
        "trained_at": row.trained_at,
        "lease": row.lease,
        "lease_ends_in_s": None if row.lease_ends is None else row.lease_ends - time.time(),
        "trains": bool(row.trains),
        "marked": not row.train,
        "place": place,
    }


def _turn(row: dict[str, Any]) -> dict[str, Any]:
    provenance = json.loads(row.pop("provenance"))
    sizes = {name: int(row[name]) for name in ("prompt_tokens", "output_tokens")}
    return {**row, **sizes, "spans": provenance["spans"]}
