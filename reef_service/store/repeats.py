"""Answers that were given, found again by the request that they answer."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from reef_service.store.errors import StoreError
from reef_service.store.schema import answer_keys, turns
from reef_service.store.turns import CONTINUABLE, TurnState, record_of
from slime_backend.provenance.records import RolloutRecord


class KeyUsed(StoreError):
    """A key of a client's was used for another request."""

    @staticmethod
    def words(key: str) -> str:
        return f"Idempotency-Key {key!r} was used for another request of this session; a new request needs a new key"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    record: RolloutRecord
    state: TurnState
    answer: str  # JSON, of data_plane/stored_answers.py
    trajectory: int


def read_answer(connection: Connection, session: str, request: str, key: str) -> StoredAnswer | None:
    """The answer to a request of a session ("" without one), by its key, or where it has none by its digest.

    Raises KeyUsed.
    """
    receipt = _by_key(connection, session, request, key) if key else _by_digest(connection, session, request)
    row = connection.execute(select(turns).where(turns.c.receipt == receipt)).mappings().first() if receipt else None
    if row is None or not row["answer"]:
        return None
    return StoredAnswer(record_of(row), row["state"], row["answer"], row["trajectory"])


def _by_key(connection: Connection, session: str, request: str, key: str) -> str | None:
    k = answer_keys.c
    found = connection.execute(select(k.receipt, k.request).where(k.session == session, k.key == key)).first()
    if found is None:
        return None
    if found.request != request:
        raise KeyUsed(KeyUsed.words(key))
    return str(found.receipt)


def _by_digest(connection: Connection, session: str, request: str) -> str | None:
    """The session's last turn of this request, if it was answered and nothing went on from its answer."""
    t = turns.c
    of_request = select(t.receipt, t.state).where(t.session == session, t.request == request)
    last = connection.execute(of_request.order_by(t.finished_at.desc()).limit(1)).first()
    if last is None or last.state not in CONTINUABLE:
        return None
    went_on = select(t.receipt).where(t.session == session, t.parent == last.receipt).limit(1)
    return None if connection.execute(went_on).first() is not None else str(last.receipt)
