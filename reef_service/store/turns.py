"""One answered request as it is stored, and where it lies among the others of its session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, RowMapping, bindparam, func, insert, select, update

from reef_service.store import counters
from reef_service.store.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from reef_service.store.schema import answer_keys, publications, trajectories, turns
from reef_service.store.turn_classes import class_of, stronger
from slime_backend.provenance.kv_contexts import read_segments
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import Prefill, Span

TurnState = Literal[
    "complete",  # the client has the answer and every token's provenance is known
    "spliced",  # an engine was lost in the middle of a stream, another one went on: provenance of the first part is not
    "disconnected",  # the client went away; what had been sampled by then is kept
    "failed",  # no engine finished it
]
CONTINUABLE = ("complete", "spliced")  # the client holds exactly these tokens


@dataclass(frozen=True, slots=True)
class History:
    """A history identifies a conversation up to some point: `length` items of `kind`, with this digest."""

    kind: str  # chat: messages; text: characters; ids: tokens
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Turn:
    """`record` without group and reward, which belong to trajectories."""

    record: RolloutRecord
    parent: str | None
    api: str
    state: TurnState
    label: str
    history: History
    train: bool = True  # False: the client marked its branch as not to be trained on
    request: str = ""  # digest of the request, "" where a retry of it isn't to be known
    answer: str = ""  # JSON of what a retry is answered
    key: str = ""  # the client's own, for asking again

    @property
    def rollout_class(self) -> str:
        return class_of(self.record) if self.state == "complete" else ""


@dataclass(frozen=True, slots=True)
class Placed:
    """Placed describes where a turn was stored."""

    trajectory: int
    forked: bool  # it begins a trajectory although its session has others
    begun: bool = False  # it begins a trajectory


_OF_TIP = ("depth", "prompt_tokens", "train")

# Built once: to build a statement costs SQLAlchemy several times what SQLite needs to run it.
_FIND_OPEN = select(trajectories).where(
    trajectories.c.session == bindparam("session"),
    trajectories.c.tip == bindparam("parent"),
    trajectories.c.scored_at.is_(None),
)
_LAST_NUMBER = select(func.max(trajectories.c.number)).where(trajectories.c.session == bindparam("session"))
_BEGIN_TRAJECTORY = insert(trajectories)
_EXTEND_TRAJECTORY = (
    update(trajectories)
    .where(trajectories.c.session == bindparam("of_session"), trajectories.c.number == bindparam("of_number"))
    .values({name: bindparam(f"new_{name}") for name in ("tip", "turns", "class", "oldest", "sound", *_OF_TIP)})
)
_INSERT_TURN = insert(turns)
_INSERT_KEY = insert(answer_keys)
_FIND_KEY = select(answer_keys.c.receipt).where(
    answer_keys.c.session == bindparam("session"), answer_keys.c.key == bindparam("key")
)
_DEPTH = select(turns.c.depth).where(turns.c.receipt == bindparam("receipt"))
_NUMBER_OF_VERSION = select(func.max(publications.c.number)).where(
    publications.c.version == bindparam("version"), publications.c.state.in_(("found", "resumed"))
)


class VersionNumbers:
    """The publication that a version is of, asked for with every turn and so remembered. For the writing thread.

    A name that came twice (a rollback) counts as its last coming, the one that requests ran under.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, connection: Connection, version: str) -> int:
        """0 where it is in no list of ours."""
        known = self._known.get(version)
        if known is None:
            known = connection.scalar(_NUMBER_OF_VERSION, {"version": version})
            if known is None:
                return 0
            self._known[version] = known
        return known

    def forget(self, version: str) -> None:
        """It gets another number."""
        self._known.pop(version, None)

    def forget_all(self) -> None:
        self._known.clear()


def add_turn(connection: Connection, turn: Turn, numbers: VersionNumbers) -> Placed:
    """Store a turn; it goes on with its parent's trajectory while that is open and the parent is its last turn.

    A turn that the client can't go on from is in no trajectory (number -1), and nobody trains on it.
    """
    oldest = min((numbers.of(connection, name) for name in turn.record.versions), default=0)
    depth = 1
    if turn.parent is not None:
        depth += connection.scalar(_DEPTH, {"receipt": turn.parent}) or 0
    placed = _place(connection, turn, oldest, depth) if turn.state in CONTINUABLE else Placed(-1, forked=False)
    row = _row(turn, placed, oldest)
    connection.execute(_INSERT_TURN, {**row, "depth": depth})
    if turn.key and turn.state in CONTINUABLE:
        key = _key_row(turn)
        if connection.execute(_FIND_KEY, key).first() is None:
            connection.execute(_INSERT_KEY, key)
    changes = {counters.of_turn(turn.state, turn.rollout_class): 1}
    changes["bytes"] = sum(len(row[name]) for name in counters.SIZED)
    if placed.begun:
        changes |= {"trajectories": 1, "sessions": int(not placed.forked)}
    counters.add(connection, changes)
    return placed


def _key_row(turn: Turn) -> dict[str, Any]:
    record = turn.record
    session = "" if record.session == record.receipt else record.session
    return {
        "session": session,
        "key": turn.key,
        "request": turn.request,
        "receipt": record.receipt,
        "at": record.finished_at,
    }


def _place(connection: Connection, turn: Turn, oldest: int, depth: int) -> Placed:
    session = turn.record.session
    tokens = len(turn.record.prompt_ids)
    parents = None
    if turn.parent is not None:
        parents = connection.execute(_FIND_OPEN, {"session": session, "parent": turn.parent}).mappings().first()
    sound = int(turn.state == "complete")
    if parents is not None:
        connection.execute(
            _EXTEND_TRAJECTORY,
            {
                "of_session": session,
                "of_number": parents["number"],
                "new_tip": turn.record.receipt,
                "new_turns": parents["turns"] + 1,
                "new_class": stronger(parents["class"], turn.rollout_class),
                "new_oldest": min(parents["oldest"], oldest),
                "new_sound": min(parents["sound"], sound),
                "new_depth": depth,
                "new_prompt_tokens": tokens,
                "new_train": min(parents["train"], int(turn.train)),
            },
        )
        return Placed(parents["number"], forked=False)
    # A session of its own is called as its receipt: nobody else is in it.
    alone = session == turn.record.receipt
    last = None if alone else connection.scalar(_LAST_NUMBER, {"session": session})
    number = 0 if last is None else last + 1
    connection.execute(
        _BEGIN_TRAJECTORY,
        {
            "session": session,
            "number": number,
            "label": turn.label,
            "tip": turn.record.receipt,
            "turns": 1,
            "class": turn.rollout_class,
            "oldest": oldest,
            "sound": sound,
            "depth": depth,
            "prompt_tokens": tokens,
            "train": int(turn.train),
        },
    )
    return Placed(number, forked=last is not None, begun=True)


def _row(turn: Turn, placed: Placed, oldest: int) -> dict[str, Any]:
    record = turn.record
    return {
        "receipt": record.receipt,
        "session": record.session,
        "trajectory": placed.trajectory,
        "parent": turn.parent,
        "label": turn.label,
        "api": turn.api,
        "state": turn.state,
        "engine": record.engine,
        "submitted_at": record.submitted_at,
        "finished_at": record.finished_at,
        "prompt_ids": pack_ids(record.prompt_ids),
        "output_ids": pack_ids(record.output_ids),
        "logprobs": pack_floats(record.logprobs),
        "provenance": _provenance(record),
        "class": turn.rollout_class,
        "oldest": oldest,
        "finish_reason": record.finish_reason,
        "temperature": record.temperature,
        "attempts": record.attempts,
        "history_kind": turn.history.kind,
        "history_length": turn.history.length,
        "history_digest": turn.history.digest,
        "request": turn.request,
        "answer": turn.answer if turn.state in CONTINUABLE else "",
    }


def record_of(row: RowMapping, *, group: str = "", reward: float = 0.0) -> RolloutRecord:
    """The record of a row of `turns`."""
    provenance = json.loads(row["provenance"])
    return RolloutRecord(
        receipt=row["receipt"],
        group=group or row["label"] or row["session"],
        engine=row["engine"],
        question="",
        prompt_ids=tuple(unpack_ids(row["prompt_ids"])),
        output_ids=tuple(unpack_ids(row["output_ids"])),
        logprobs=tuple(unpack_floats(row["logprobs"])),
        temperature=row["temperature"],
        reward=reward,
        finish_reason=row["finish_reason"],
        spans=tuple(Span.from_json(s) for s in provenance["spans"]),
        segments=read_segments(provenance["segments"]),
        prefills=tuple(Prefill.from_json(p) for p in provenance["prefills"]),
        submitted_at=row["submitted_at"],
        finished_at=row["finished_at"],
        attempts=row["attempts"],
        session=row["session"],
        sampling=provenance.get("sampling", {}),
    )


def _provenance(record: RolloutRecord) -> str:
    data = record.to_json()
    return json.dumps(
        {name: data[name] for name in ("spans", "segments", "prefills", "sampling") if name in data},
        separators=(",", ":"),
    )
