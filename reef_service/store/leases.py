"""Leases: trajectories given to a trainer until it acknowledges having trained on them, or until the lease runs out.

    given --ack--> trained, for good        given --ends_at passes, or release--> to be given again

A trainer acknowledges after its own checkpoint is on the disk. If it dies before, the samples are given again; if it
dies between checkpoint and acknowledgement, it acknowledges again when it is back: that is allowed any number of times,
and refused only when the lease ran out and another lease has a sample of it.

A job (jobs.py) names its leases by its steps, and nobody else may use them.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from reef_service.store import counters
from reef_service.store.errors import LeaseGone, UnknownLease
from reef_service.store.groups import complete_groups
from reef_service.store.schema import leases, trajectories
from reef_service.store.wishes import Key, Wish, available

__all__ = ["Key", "Lease", "Wish", "ack", "check_job", "give", "is_held", "keep_own", "release", "renew", "samples_of"]


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    ends_at: float
    samples: tuple[Key, ...]


def give(connection: Connection, wish: Wish) -> Lease:
    """A lease on what there is, oldest score first; without samples, and not stored, where there is nothing.

    Asked for again by its name, a lease that is still held is renewed. Raises LeaseGone for one that is over or another
    job's. A step that is asked for again gets its lease as long as that holds, and then one of another name.
    """
    now = time.time()
    if wish.step is not None:
        earlier = _of_step(connection, wish)
        held = [lease for lease in earlier if is_held(connection, lease)]
        if held:
            return _renew(connection, held[-1], now + wish.lease_s)
        for lease in earlier:  # the job trains on the new one: nothing of this is acknowledged with its step
            release(connection, lease.id)
        wish = replace(wish, id=f"{wish.job}:{wish.step}" + (f".{len(earlier)}" if earlier else ""))
    if wish.id is not None:
        known = connection.execute(select(leases).where(leases.c.id == wish.id)).first()
        if known is not None:
            check_job(known, wish.job)
            return _renew(connection, known, now + wish.lease_s)
    identity = wish.id or uuid.uuid4().hex
    chosen = _choose(connection, wish, now)
    ends_at = now + wish.lease_s
    if len(chosen) < wish.at_least * (wish.group_size or 1):
        chosen = []
    if chosen:
        for session, number in chosen:
            connection.execute(_only(session, number).values(lease=identity, lease_ends=ends_at))
        connection.execute(
            insert(leases).values(
                id=identity,
                holder=wish.holder,
                given_at=now,
                ends_at=ends_at,
                samples=json.dumps(chosen),
                job=wish.job,
                step=wish.step,
            )
        )
    return Lease(identity, ends_at, tuple(chosen))


def ack(connection: Connection, lease_id: str, job: str | None = None) -> int:
    """Mark the lease's samples as trained on; how many. `job`: who says so, None for whoever knows the lease's name.

    Raises UnknownLease, LeaseGone.
    """
    lease = _find(connection, lease_id)
    if job is not None:
        check_job(lease, job)
    samples = samples_of(lease)
    if lease.acked_at is not None:
        return len(samples)
    now = time.time()
    elsewhere = [key for key in samples if not _holds(connection, key, lease_id)]
    if elsewhere or lease.released_at is not None:
        raise LeaseGone(
            f"lease {lease_id} ran out or was given back, and {len(elsewhere)} of its {len(samples)} samples are no "
            "longer its own; what was trained on them must not be kept"
        )
    newly = 0
    for session, number in samples:
        newly += connection.execute(
            _only(session, number).where(trajectories.c.trained_at.is_(None)).values(trained_at=now, lease_ends=None)
        ).rowcount
    counters.add(connection, {"trained": newly})
    connection.execute(update(leases).where(leases.c.id == lease_id).values(acked_at=now))
    return len(samples)


def keep_own(connection: Connection, lease: Any, now: float) -> int:
    """Mark what is left to a lease that ran out as trained on, and give up the rest; how many are left."""
    kept = 0
    for session, number in samples_of(lease):
        own = _only(session, number).where(trajectories.c.lease == lease.id, trajectories.c.trained_at.is_(None))
        kept += connection.execute(own.values(trained_at=now, lease_ends=None)).rowcount
    counters.add(connection, {"trained": kept})
    connection.execute(update(leases).where(leases.c.id == lease.id).values(released_at=now))
    return kept


def release(connection: Connection, lease_id: str, job: str | None = None) -> int:
    """Give the samples back before the lease ends; how many. Nothing happens to one that was acknowledged."""
    lease = _find(connection, lease_id)
    if job is not None:
        check_job(lease, job)
    if lease.acked_at is not None or lease.released_at is not None:
        return 0
    freed = 0
    for session, number in samples_of(lease):
        found = connection.execute(
            _only(session, number).where(trajectories.c.lease == lease_id).values(lease=None, lease_ends=None)
        )
        freed += found.rowcount
    connection.execute(update(leases).where(leases.c.id == lease_id).values(released_at=time.time()))
    return freed


def check_job(lease: Any, job: str) -> None:
    """Raise LeaseGone for a lease of another job."""
    if lease.job != job:
        owner = f"belongs to job {lease.job!r}" if lease.job else "belongs to no job"
        raise LeaseGone(f"lease {lease.id} {owner}; ask under another name")


def renew(connection: Connection, lease: Any, ends_at: float) -> None:
    """Let a lease that is held end later."""
    for session, number in samples_of(lease):
        connection.execute(_only(session, number).values(lease_ends=ends_at))
    connection.execute(update(leases).where(leases.c.id == lease.id).values(ends_at=ends_at))


def _choose(connection: Connection, wish: Wish, now: float) -> list[Key]:
    t = trajectories.c
    if wish.group_size:
        return [key for group in complete_groups(connection, wish, now) for key in group]
    query = select(t.session, t.number).where(*available(wish, now)).order_by(t.scored_at, t.session, t.number)
    return [(row.session, row.number) for row in connection.execute(query.limit(wish.limit))]


def _of_step(connection: Connection, wish: Wish) -> list[Any]:
    """Every lease that the job had for the step, oldest first."""
    of_step = select(leases).where(leases.c.job == wish.job, leases.c.step == wish.step)
    return list(connection.execute(of_step.order_by(leases.c.given_at, leases.c.id)))


def is_held(connection: Connection, lease: Any) -> bool:
    if lease.acked_at is not None or lease.released_at is not None:
        return False
    return all(_holds(connection, key, lease.id) for key in samples_of(lease))


def _renew(connection: Connection, lease: Any, ends_at: float) -> Lease:
    samples = samples_of(lease)
    if lease.acked_at is not None:
        raise LeaseGone(f"lease {lease.id} was acknowledged; ask for the next under another name")
    if lease.released_at is not None or not all(_holds(connection, key, lease.id) for key in samples):
        raise LeaseGone(f"lease {lease.id} ran out or was given back; ask under another name")
    renew(connection, lease, ends_at)
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


def samples_of(lease: Any) -> tuple[Key, ...]:
    return tuple((session, number) for session, number in json.loads(lease.samples))
