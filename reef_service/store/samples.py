"""Training-ready samples, read back from their turns, and what else is read without a lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from reef_service.store.leases import Key
from reef_service.store.packing import unpack_ids
from reef_service.store.schema import publications, trajectories, turns
from reef_service.store.turns import CONTINUABLE, History, record_of
from slime_backend.provenance.records import RolloutRecord


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One trajectory. Everything per token is over `response`: what follows the first turn's prompt.

    `mask` is 1 on the tokens that this trajectory's turns sampled. What lies between them (tool answers, users) has 0
    and a log-prob of 0.
    """

    session: str
    trajectory: int
    label: str
    score: float
    rollout_class: str
    oldest: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[RolloutRecord]


def read_sample(connection: Connection, key: Key) -> StoredSample:
    """The sample of a trajectory. Its last turn holds all its tokens: each prompt begins with the turn before."""
    session, number = key
    head = connection.execute(
        select(trajectories).where(trajectories.c.session == session, trajectories.c.number == number)
    ).one()
    rows = (
        connection.execute(
            select(turns)
            .where(turns.c.session == session, turns.c.trajectory == number)
            .order_by(turns.c.submitted_at, turns.c.receipt)
        )
        .mappings()
        .all()
    )
    records = sorted((record_of(row, reward=head.score or 0.0) for row in rows), key=lambda r: len(r.prompt_ids))
    first, last = records[0], records[-1]
    tokens = [*last.prompt_ids, *last.output_ids]
    start = len(first.prompt_ids)
    mask, logprobs = [0] * (len(tokens) - start), [0.0] * (len(tokens) - start)
    for record in records:
        begin = len(record.prompt_ids) - start
        end = begin + len(record.output_ids)
        mask[begin:end] = [1] * (end - begin)
        logprobs[begin:end] = record.logprobs
    return StoredSample(
        session,
        number,
        head.label,
        head.score or 0.0,
        head._mapping["class"],
        head.oldest,
        tokens[:start],
        tokens[start:],
        mask,
        logprobs,
        records,
    )


def read_history(connection: Connection, session: str) -> list[tuple[str, History, int]]:
    """(receipt, history, tokens) of each turn that a next request of the session may go on from, oldest first."""
    t = turns.c
    rows = connection.execute(
        select(
            t.receipt,
            t.history_kind,
            t.history_length,
            t.history_digest,
            (func.length(t.prompt_ids) + func.length(t.output_ids)) / 4,
        )
        .where(t.session == session, t.state.in_(CONTINUABLE))
        .order_by(t.finished_at)
    )
    return [(row[0], History(row[1], row[2], row[3]), int(row[4])) for row in rows]


def read_tokens(connection: Connection, receipt: str) -> list[int] | None:
    """Prompt and output of a turn; None of one that isn't there, or any more."""
    row = connection.execute(select(turns.c.prompt_ids, turns.c.output_ids).where(turns.c.receipt == receipt)).first()
    return None if row is None else [*unpack_ids(row.prompt_ids), *unpack_ids(row.output_ids)]


def read_turn(connection: Connection, receipt: str) -> dict[str, Any] | None:
    """Everything of a turn as JSON, or None."""
    row = connection.execute(select(turns).where(turns.c.receipt == receipt)).mappings().first()
    if row is None:
        return None
    plain = {k: v for k, v in row.items() if k not in ("prompt_ids", "output_ids", "logprobs", "provenance")}
    record = record_of(row)
    data = {**record.to_json(), "segments": [segment.to_json() for segment in record.segments]}  # each context complete
    extra = ("prompt_ids", "output_ids", "logprobs", "spans", "segments", "prefills")
    return {**plain, **{k: data[k] for k in extra}}


def read_publications(connection: Connection, limit: int) -> Sequence[dict[str, Any]]:
    """The newest first, as JSON without reports."""
    rows = connection.execute(select(publications).order_by(publications.c.number.desc()).limit(limit)).mappings()
    return [dict(row) for row in rows]


def read_is_used(connection: Connection, version: str) -> bool:
    named = select(publications.c.number).where(publications.c.version == version, publications.c.state != "failed")
    return connection.execute(named.limit(1)).first() is not None
