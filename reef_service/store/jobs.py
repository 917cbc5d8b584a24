"""A training job's leases: by its steps, for it alone, acknowledged by what its checkpoint holds.

    step asked for ──► lease of (job, step)      the same samples as long as it is held, also after a restart
    saved(step)    ──► every lease up to it is acknowledged, every later one is held for longer

So a trainer needs to remember nothing: what its checkpoint holds says which leases are over.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, select

from reef_service.store import leases
from reef_service.store.errors import LeaseGone
from reef_service.store.schema import leases as table


def saved(connection: Connection, job: str, step: int, lease_s: float | None) -> dict[str, Any]:
    """Acknowledge the job's leases up to `step` (-1: none), and renew its later ones for `lease_s`, if that is given.
    Safe to repeat.

    Returns {"acknowledged": names of leases, "trained": samples of these, "gone": leases that ran out and whose samples
    others were given, "held": leases that were renewed}.
    """
    found: dict[str, Any] = {"acknowledged": [], "trained": 0, "gone": [], "held": []}
    unsettled = select(table).where(table.c.job == job, table.c.acked_at.is_(None), table.c.released_at.is_(None))
    now = time.time()
    for lease in connection.execute(unsettled.order_by(table.c.step, table.c.given_at)).all():
        if lease.step is None:
            continue
        held = leases.is_held(connection, lease)
        if lease.step > step:
            if held and lease_s is not None:
                leases.renew(connection, lease, now + lease_s)
                found["held"].append(lease.id)
            continue
        try:
            found["trained"] += leases.ack(connection, lease.id)
            found["acknowledged"].append(lease.id)
        except LeaseGone:
            found["trained"] += leases.keep_own(connection, lease, now)
            found["gone"].append(lease.id)
    return found


def open_leases(connection: Connection, job: str) -> list[dict[str, Any]]:
    """The job's leases that are neither acknowledged nor given back, by step."""
    c = table.c
    query = select(c.id, c.step, c.given_at, c.ends_at).where(
        c.job == job, c.acked_at.is_(None), c.released_at.is_(None)
    )
    return [dict(row) for row in connection.execute(query.order_by(c.step, c.given_at)).mappings()]
