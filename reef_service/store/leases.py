"""Leases: trajectories given to a trainer until it acknowledges having trained on them, or until the lease runs out.

    given --ack--> trained, for good        given --ends_at passes, or release--> to be given again

A trainer acknowledges after its own checkpoint is on the disk. If it dies before, the samples are given again; if it
dies between checkpoint and acknowledgement, it acknowledges again when it is back: that is allowed any number of times,
and refused only when the lease ran out and another lease has a sample of it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from reef_service.store.errors import LeaseGone, UnknownLease
from reef_service.store.schema import leases, trajectories
from slime_backend.provenance.classes import CLASSES

Key = tuple[str, int]  # session, number of the trajectory
LOOK_AT = 4096  # trajectories that one request for complete groups looks at, oldest first


@dataclass(frozen=True, slots=True)
class Wish:
    """Which samples a trainer wants."""

    limit: int = 64  # samples, or groups where group_size is given
    lease_s: float = 600.0
    holder: str = ""
    id: str | None = None  # of the lease, by the trainer: asking again with it gives the same samples
    min_score: float | None = None
    max_score: float | None = None
    classes: tuple[str, ...] = CLASSES
    oldest: int = 0  # publication; nothing that was sampled before it
    group_size: int = 0  # > 0: complete groups of this many, by the label that clients gave


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    ends_at: float
    samples: tuple[Key, ...]


def give(connection: Connection, wish: Wish) -> Lease:
    """A lease on what there is, oldest score first; without samples, and not stored, where there is nothing.

    Asked for again by its name, a lease that is still held is renewed. Raises LeaseGone for one that is over.
    """
    now = time.time()
    if wish.id is not None:
        known = connection.execute(select(leases).where(leases.c.id == wish.id)).first()
        if known is not None:
            return _renew(connection, known, now + wish.lease_s)
    identity = wish.id or uuid.uuid4().hex
    chosen = _choose(connection, wish, now)
    ends_at = now + wish.lease_s
    if chosen:
        for session, number in chosen:
            connection.execute(_only(session, number).values(lease=identity, lease_ends=ends_at))
        connection.execute(
            insert(leases).values(
                id=identity, holder=wish.holder, given_at=now, ends_at=ends_at, samples=json.dumps(chosen)
            )
        )
    return Lease(identity, ends_at, tuple(chosen))


def ack(connection: Connection, lease_id: str) -> int:
    """Mark the lease's samples as trained on; how many. Raises UnknownLease, LeaseGone."""
    lease = _find(connection, lease_id)
    samples = _samples(lease.samples)
    if lease.acked_at is not None:
        return len(samples)
    now = time.time()
    elsewhere = [key for key in samples if not _holds(connection, key, lease_id)]
    if elsewhere or lease.released_at is not None:
        raise LeaseGone(
            f"lease {lease_id} ran out or was given back, and {len(elsewhere)} of its {len(samples)} samples are no "
            "longer its own; what was trained on them must not be kept"
        )
    for session, number in samples:
        connection.execute(_only(session, number).values(trained_at=now, lease_ends=None))
    connection.execute(update(leases).where(leases.c.id == lease_id).values(acked_at=now))
    return len(samples)


def release(connection: Connection, lease_id: str) -> int:
    """Give the samples back before the lease ends; how many. Nothing happens to one that was acknowledged."""
    lease = _find(connection, lease_id)
    if lease.acked_at is not None or lease.released_at is not None:
        return 0
    freed = 0
    for session, number in _samples(lease.samples):
        found = connection.execute(
            _only(session, number).where(trajectories.c.lease == lease_id).values(lease=None, lease_ends=None)
        )
        freed += found.rowcount
    connection.execute(update(leases).where(leases.c.id == lease_id).values(released_at=time.time()))
    return freed


def _choose(connection: Connection, wish: Wish, now: float) -> list[Key]:
    t = trajectories.c
    query = (
        select(t.session, t.number, t.label)
        .where(
            t.trained_at.is_(None),
            t.scored_at.is_not(None),
            t.lease.is_(None) | (t.lease_ends < now),
            t.sound == 1,
            trajectories.c["class"].in_(wish.classes),
            t.oldest >= wish.oldest,
        )
        .order_by(t.scored_at, t.session, t.number)
    )
    if wish.min_score is not None:
        query = query.where(t.score >= wish.min_score)
    if wish.max_score is not None:
        query = query.where(t.score <= wish.max_score)
    if not wish.group_size:
        return [(row.session, row.number) for row in connection.execute(query.limit(wish.limit))]
    groups: defaultdict[str, list[Key]] = defaultdict(list)
    complete: list[Key] = []
    for row in connection.execute(query.where(t.label != "").limit(LOOK_AT)):
        group = groups[row.label]
        group.append((row.session, row.number))
        if len(group) == wish.group_size:
            complete += group
            groups[row.label] = []
            if len(complete) == wish.limit * wish.group_size:
                break
    return complete


def _renew(connection: Connection, lease: Any, ends_at: float) -> Lease:
    samples = _samples(lease.samples)
    if lease.acked_at is not None:
        raise LeaseGone(f"lease {lease.id} was acknowledged; ask for the next under another name")
    if lease.released_at is not None or not all(_holds(connection, key, lease.id) for key in samples):
        raise LeaseGone(f"lease {lease.id} ran out or was given back; ask under another name")
    for session, number in samples:
        connection.execute(_only(session, number).values(lease_ends=ends_at))
    connection.execute(update(leases).where(leases.c.id == lease.id).values(ends_at=ends_at))
    return Lease(lease.id, ends_at, samples)


def _only(session: str, number: int) -> Any:
    return update(trajectories).where(trajectories.c.session == session, trajectories.c.number == number)


def _holds(connection: Connection, key: Key, lease_id: str) -> bool:
    found = connection.scalar(
        select(trajectories.c.lease).where(trajectories.c.session == key[0], trajectories.c.number == key[1])
    )
    return bool(found == lease_id)


def _find(connection: Connection, lease_id: str) -> Any:
    found = connection.execute(select(leases).where(leases.c.id == lease_id)).first()
    if found is None:
        raise UnknownLease(f"there is no lease {lease_id!r}")
    return found


def _samples(text: str) -> tuple[Key, ...]:
    return tuple((session, number) for session, number in json.loads(text))
