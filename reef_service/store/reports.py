"""Reports: an agent's scores and texts for its turns. One sent twice under an id is stored once, answered the same."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from reef_service.store import counters
from reef_service.store.choice import choose_branch
from reef_service.store.errors import ReportConflict, UnknownReceipts
from reef_service.store.schema import reports, trajectories, turns


@dataclass(frozen=True, slots=True)
class Report:
    """A report is about turns (`receipts`), or about everything in a session so far.

    `train` False marks the branches that it is about as not to be trained on.
    """

    id: str
    score: float | None = None
    text: str = ""
    receipts: tuple[str, ...] = ()
    session: str = ""
    train: bool = True

    def to_json(self) -> dict[str, Any]:
        marked = {} if self.train else {"train": False}  # left out otherwise: older stores have digests without it
        return {
            **marked,
            "id": self.id,
            "score": self.score,
            "text": self.text,
            "receipts": list(self.receipts),
            "session": self.session,
        }


def add_report(connection: Connection, report: Report) -> dict[str, Any]:
    """Store a report and give its score to the trajectories that it is about; choice.py has which of them trains.

    Returns {"trajectories": how many took the score or the mark, "late": trajectories that are with a trainer or
    trained on already}. Raises ReportConflict, UnknownReceipts.
    """
    body = json.dumps(report.to_json(), sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    known = connection.execute(select(reports.c.digest, reports.c.outcome).where(reports.c.id == report.id)).first()
    if known is not None:
        if known.digest != digest:
            raise ReportConflict(f"report {report.id!r} is stored with other contents; give a new report a new id")
        outcome: dict[str, Any] = json.loads(known.outcome)
        return outcome
    concerned = _concerned(connection, report)
    now = time.time()
    took, newly, late = 0, 0, []
    values: dict[str, Any] = {}
    if report.score is not None:
        values |= {"score": report.score, "scored_at": now, "named": int(bool(report.receipts))}
    values |= {} if report.train else {"train": 0}
    for session, number in concerned if values else ():
        t = trajectories.c
        concerns = (t.session == session, t.number == number)
        score_before = connection.execute(select(t.scored_at).where(*concerns)).scalar()
        result = connection.execute(
            update(trajectories)
            .where(*concerns, t.trained_at.is_(None), t.lease.is_(None) | (t.lease_ends < now))
            .values(values)
        )
        if result.rowcount:
            took += 1
            newly += score_before is None and "scored_at" in values
        else:
            late.append({"session": session, "trajectory": number})
    counters.add(connection, {"scored": newly})
    if values:
        for session in sorted({session for session, _ in concerned}):
            choose_branch(connection, session)
    outcome = {"id": report.id, "trajectories": took, "late": late}
    connection.execute(
        insert(reports).values(id=report.id, digest=digest, body=body, outcome=json.dumps(outcome), at=now)
    )
    return outcome


def _concerned(connection: Connection, report: Report) -> list[tuple[str, int]]:
    """(session, trajectory) of everything that the report names."""
    if report.receipts:
        rows = connection.execute(
            select(turns.c.receipt, turns.c.session, turns.c.trajectory).where(turns.c.receipt.in_(report.receipts))
        ).all()
        missing = sorted(set(report.receipts) - {row.receipt for row in rows})
        if missing:
            named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UnknownReceipts(f"no turn is stored under {named}")
        return sorted({(row.session, row.trajectory) for row in rows if row.trajectory >= 0})
    found = connection.execute(
        select(trajectories.c.session, trajectories.c.number).where(trajectories.c.session == report.session)
    ).all()
    if not found:
        raise UnknownReceipts(f"no turn is stored in session {report.session!r}")
    return [(row.session, row.number) for row in found]
