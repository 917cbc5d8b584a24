"""Sessions that were trained on are removed once they are old enough, or the store is too large; nothing else is.

A session goes as one, with its turns, branches and keys: none of it is removed while a sample of it waits for a trainer
or is with one, or while it had a turn since `before`. The rows that are freed are used again; the file stays as large.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Select, bindparam, delete, exists, select

from reef_service.store import counters
from reef_service.store.schema import answer_keys, trajectories, turns

AT_ONCE = 20  # sessions in one transaction, which other writes wait for
REMOVED = "removed:"  # begins the names of counters of what is no longer there


@dataclass(frozen=True, slots=True)
class Limit:
    """Sessions are removed whose last training was before `trained_before`; while the turns have more than `most`
    bytes, those that were trained on first. Never one with a turn since `quiet_since`. None: no limit."""

    trained_before: float | None
    most: int | None
    quiet_since: float


def remove_some(connection: Connection, limit: Limit) -> list[str]:
    """Remove up to `AT_ONCE` sessions; their names, none where nothing is to be removed."""
    found: list[str] = []
    if limit.trained_before is not None:
        query = _removable(min(limit.trained_before, limit.quiet_since), limit.trained_before)
        found = [name for (name,) in connection.execute(query.limit(AT_ONCE))]
        for name in found:
            _remove(connection, name)
    if limit.most is not None and not found:
        for (name,) in connection.execute(_removable(limit.quiet_since, None).limit(AT_ONCE)).all():
            if counters.value_of(connection, "bytes") <= limit.most:
                break
            _remove(connection, name)
            found.append(name)
    return found


def _removable(quiet_since: float, trained_before: float | None) -> Select[str]:
    """Sessions of which something was trained on and nothing can be any more, the oldest training first."""
    first, other = trajectories.c, trajectories.alias("other")
    o = other.c
    waits = (
        o.trained_at.is_(None)
        & o.scored_at.is_not(None)
        & o.closed_at.is_(None)
        & (o.train == 1)
        & (o.sound == 1)
        & ((o.trains == 1) | (o.named == 1))
    )
    blocks = waits if trained_before is None else waits | (o.trained_at >= trained_before)
    blocking = exists().where(o.session == first.session, blocks)
    recent = exists().where(turns.c.session == first.session, turns.c.submitted_at >= quiet_since)
    # Each of a session's trainings finds it: the first by number stands for all.
    earlier = exists().where(o.session == first.session, o.number < first.number, o.trained_at.is_not(None))
    found = [first.trained_at.is_not(None), ~blocking, ~recent, ~earlier]
    if trained_before is not None:
        found.append(first.trained_at < trained_before)
    return select(first.session).where(*found).order_by(first.trained_at, first.scored_at, first.session)


_OF_SESSION = turns.c.session == bindparam("name")
_KEYS = delete(answer_keys).where(
    (answer_keys.c.session == bindparam("name"))
    | ((answer_keys.c.session == "") & (answer_keys.c.receipt == bindparam("name")))
)


def _remove(connection: Connection, name: str) -> None:
    named = {"name": name}
    gone = counters.of_session(connection, name)
    connection.execute(_KEYS, named)
    connection.execute(delete(trajectories).where(trajectories.c.session == name))
    connection.execute(delete(turns).where(_OF_SESSION), named)
    changes = {key: -value for key, value in gone.items()}
    stored = sum(value for key, value in gone.items() if key.startswith("turn:"))
    changes |= {f"{REMOVED}turns": stored, f"{REMOVED}sessions": gone["sessions"], f"{REMOVED}trained": gone["trained"]}
    counters.add(connection, changes)
