"""Numbers that the page and the metrics show, kept as rows are written, so that nobody scans the tables for them.

    turn:STATE:CLASS      turns                     trajectories, sessions      what there is
    scored, trained       trajectories that are     bytes                       of turns: tokens, log-probs, texts
    removed:...           of what was removed since (retention.py)

Each is changed in the transaction of what it counts. What a moment changes (leases run out) is counted when somebody
asks, by indexes that hold nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, text, true

from reef_service.store.schema import counters, leases, trajectories, turns

# Known to SQLite and PostgreSQL alike; SQLAlchemy has it for each of them only.
_ADD = text(
    "INSERT INTO counters (name, value) VALUES (:name, :value) "
    "ON CONFLICT (name) DO UPDATE SET value = counters.value + excluded.value"
).bindparams(bindparam("name"), bindparam("value"))
SIZED = ("prompt_ids", "output_ids", "logprobs", "provenance", "answer")  # columns of turns that grow with them
NEVER_TRAINED = ("disconnected", "failed")  # states of turns that have no provenance to be known or unknown


def add(connection: Connection, changes: Mapping[str, int]) -> None:
    """Add to counters, in the order of their names, which no two transactions then lock against each other."""
    rows = [{"name": name, "value": value} for name, value in sorted(changes.items()) if value]
    if rows:
        connection.execute(_ADD, rows)


def of_turn(state: str, rollout_class: str) -> str:
    """The name of the counter of such turns."""
    return f"turn:{state}:{rollout_class}"


def count_again(connection: Connection) -> None:
    """Set every counter by what the tables hold: for a store of a layout without them."""
    connection.execute(delete(counters))
    found = scanned(connection)
    if found:
        connection.execute(insert(counters), [{"name": name, "value": value} for name, value in found.items()])


def scanned(connection: Connection) -> Counter[str]:
    """Every counter as a scan of the tables has it; those of nothing, and of what was removed, are left out."""
    return _counted(connection, true(), true())


def of_session(connection: Connection, name: str) -> Counter[str]:
    """What the counters have of one session."""
    return _counted(connection, turns.c.session == name, trajectories.c.session == name)


def _counted(
    connection: Connection, of_turns: ColumnElement[bool], of_trajectories: ColumnElement[bool]
) -> Counter[str]:
    t = trajectories.c
    found: Counter[str] = Counter()
    size = sum((func.length(turns.c[name]) for name in SIZED[1:]), func.length(turns.c[SIZED[0]]))
    by_kind = select(turns.c.state, turns.c["class"], func.count(), func.sum(size)).where(of_turns)
    for state, name, count, stored in connection.execute(by_kind.group_by(turns.c.state, turns.c["class"])):
        found[of_turn(state, name)] = count
        found["bytes"] += int(stored)
    total, scored, trained, sessions = connection.execute(
        select(
            func.count(), func.count(t.scored_at), func.count(t.trained_at), func.count(func.distinct(t.session))
        ).where(of_trajectories)
    ).one()
    found.update({"trajectories": total, "scored": scored, "trained": trained, "sessions": sessions})
    return +found


def value_of(connection: Connection, name: str) -> int:
    return connection.scalar(select(counters.c.value).where(counters.c.name == name)) or 0


def read_counts(connection: Connection) -> dict[str, Any]:
    """What the page and the metrics show of the store.

    `classes`: of turns whose answer a client has; `leased`, `leases`: trajectories under leases that hold, and these;
    `expired`, `leases_expired`: of those that ran out and were neither acknowledged nor given to others since.
    """
    classes: Counter[str] = Counter()
    states: Counter[str] = Counter()
    plain = {"trajectories": 0, "scored": 0, "trained": 0, "sessions": 0, "bytes": 0}
    removed = {"turns": 0, "sessions": 0, "trained": 0}
    for name, value in connection.execute(select(counters.c.name, counters.c.value)):
        if name.startswith("removed:"):
            removed[name.removeprefix("removed:")] = value
            continue
        if not name.startswith("turn:"):
            plain[name] = value
            continue
        _, state, rollout_class = name.split(":", 2)
        states[state] += value
        if state not in NEVER_TRAINED:
            classes[rollout_class or "unproven"] += value
    now = time.time()
    under = select(func.count()).select_from(trajectories)
    given = select(func.count()).where(leases.c.acked_at.is_(None), leases.c.released_at.is_(None))
    return {
        "classes": dict(+classes),
        "states": dict(+states),
        **plain,
        "removed": removed,
        "leased": connection.scalar(under.where(trajectories.c.lease_ends >= now)),
        "expired": connection.scalar(under.where(trajectories.c.lease_ends < now)),
        "leases": connection.scalar(given.where(leases.c.ends_at >= now)),
        "leases_expired": connection.scalar(given.where(leases.c.ends_at < now)),
    }
