"""Groups of rollouts: sessions that clients gave one label. A rollout is a session, and one branch of it trains.

Complete groups are found by counting, so that incomplete ones, however many and old, never stand in front of them. The
incomplete ones are listed, and can be closed: what is in them then is given to nobody.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, case, distinct, func, select, update

from reef_service.store.schema import trajectories
from reef_service.store.wishes import Key, Wish, available

LABELS = 500  # in one statement
MOST = 1_000_000  # groups that one call closes


def complete_groups(connection: Connection, wish: Wish, now: float) -> list[list[Key]]:
    """At most `wish.limit` complete groups, those that have been complete for the longest first."""
    t = trajectories.c
    conditions = [*available(wish, now), t.label != ""]
    counted = (
        select(t.label)
        .where(*conditions)
        .group_by(t.label)
        .having(func.count() >= wish.group_size)
        .order_by(func.min(t.scored_at), t.label)
    )
    labels = [row.label for row in connection.execute(counted)]
    groups: list[tuple[float, list[Key]]] = []
    for at in range(0, len(labels), LABELS):
        members: defaultdict[str, list[Key]] = defaultdict(list)
        rows = select(t.session, t.number, t.label, t.scored_at).where(
            *conditions, t.label.in_(labels[at : at + LABELS])
        )
        for row in connection.execute(rows.order_by(t.scored_at, t.session, t.number)):
            members[row.label].append((row.session, row.number))
            if len(members[row.label]) == wish.group_size:
                groups.append((row.scored_at, members.pop(row.label)))
    groups.sort(key=lambda group: (group[0], group[1]))
    return [keys for _, keys in groups[: wish.limit]]


def incomplete_groups(connection: Connection, size: int, limit: int) -> list[dict[str, Any]]:
    """Groups with sessions that wait for others, the oldest first: what is scored and not with a trainer doesn't make a
    complete one."""
    t = trajectories.c
    now = time.time()
    waiting = (t.trained_at.is_(None)) & (t.lease.is_(None) | (t.lease_ends < now))
    ready = waiting & (t.scored_at.is_not(None)) & (t.trains == 1) & (t.sound == 1)
    whole = t.closed_at.is_(None) & (t.label != "")
    counted = (
        select(
            t.label,
            func.count(distinct(t.session)).label("sessions"),
            _count_sessions(t.scored_at.is_not(None)).label("scored"),
            _count_sessions(ready).label("ready"),
            _count_sessions(t.trained_at.is_not(None)).label("trained"),
            _count_sessions(~waiting & t.trained_at.is_(None)).label("leased"),
            func.min(t.scored_at).label("first_score"),
            func.max(t.scored_at).label("last_score"),
        )
        .where(whole)
        .group_by(t.label)
        .having((_count_sessions(waiting) > 0) & (_count_sessions(ready) < size))
        .order_by(func.min(t.scored_at), t.label)
    )
    found = []
    for row in connection.execute(counted):
        # Sessions that were taken already are of complete groups; the rest is what waits.
        if row.sessions - row.trained - row.leased > 0:
            found.append(dict(row._mapping))
        if len(found) == limit:
            break
    return found


def close_groups(
    connection: Connection, size: int, labels: Sequence[str] | None = None, idle_s: float = 0.0
) -> dict[str, int]:
    """Close incomplete groups: what of them is not with a trainer is given to nobody any more.

    `labels`: only these; `idle_s`: only those without a score since then. Sessions that begin later under such a label
    make a new group. Returns label -> trajectories that were closed.
    """
    before = time.time() - idle_s
    closed: dict[str, int] = {}
    for group in incomplete_groups(connection, size, MOST):
        label, last = group["label"], group["last_score"]
        if (labels is None or label in labels) and (not idle_s or (last is not None and last <= before)):
            closed[label] = _close(connection, label)
    return closed


def _close(connection: Connection, label: str) -> int:
    t = trajectories.c
    now = time.time()
    closing = update(trajectories).where(
        t.session.in_(select(t.session).where(t.label == label)),
        t.trained_at.is_(None),
        t.closed_at.is_(None),
        t.lease.is_(None) | (t.lease_ends < now),
    )
    values = {"closed_at": now, "trains": 0, "named": 0, "lease": None, "lease_ends": None}
    return connection.execute(closing.values(values)).rowcount


def _count_sessions(condition: Any) -> Any:
    t = trajectories.c
    return func.count(distinct(case((condition, t.session))))
