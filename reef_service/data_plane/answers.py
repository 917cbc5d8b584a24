"""What is asked of the engines, and what comes back: the words between the APIs and an exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reef_service.store.turn_classes import class_of
from reef_service.store.turns import History, TurnState
from reef_service.text.answer_parser import AnswerParser, Piece, ToolCall
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import not_auditable


@dataclass(slots=True)
class Answer:
    """The answer to a client holds the parts that have come so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    raw: str = ""  # the complete text before it was cut into parts
    pieces: list[Piece] = field(default_factory=list)  # in the order in which they came

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.call is not None:
            self.calls.append(piece.call)
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        else:
            self.content += piece.text


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a request may be known again by, if it comes again (repeats.py)."""

    session: str = ""
    request: str = ""  # digest of path and body, "" where nothing may ask for it again
    key: str = ""  # the client's own
    retry: bool = False  # the client's library sends it again by itself

    @property
    def names(self) -> list[tuple[str, str]]:
        """The first is what it is looked up by."""
        found = [f"key {self.key}"] if self.key else []
        found += [f"request {self.request}"] if self.session and self.request else []
        return [(self.session, name) for name in found]

    @property
    def may_be_known(self) -> bool:
        return bool(self.key) or (self.retry and bool(self.session))


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request in tokens."""

    api: str
    session: str  # "" for a session of its own, called as its receipt
    label: str
    prompt_ids: list[int]
    parent: str | None
    sampling: Mapping[str, Any]  # with max_new_tokens, temperature
    stream: bool
    history: Callable[[Answer, list[int]], History]  # of the conversation with this answer and these tokens in it
    stop: tuple[str, ...] = ()
    parser: AnswerParser | None = None  # None: all text is content
    keep_stop: bool = False  # whether a stop text stays in the text
    train: bool = True  # False: the client marked its branch as not to be trained on
    attempt: Attempt = Attempt()
    closing: str = ""  # the one of `stop` that ends an answer as the model's own end does: it stays, and isn't named


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece holds what has come since the piece before."""

    pieces: list[Piece]
    ids: list[int]  # sampled since; pieces may come later, a character or a stop text being incomplete
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Done:
    """The end; everything is stored."""

    record: RolloutRecord
    state: TurnState
    answer: Answer
    finish: str  # stop, length, tool_calls, abort
    stop_text: str | None
    cached_tokens: int
    meta: Mapping[str, Any]
    trajectory: int

    def receipt(self) -> dict[str, Any]:
        """Return what the last event of every API has under `reef`."""
        why = not_auditable(self.record.sampling)
        return {
            **({"not_auditable": why} if why else {}),
            "receipt": self.record.receipt,
            "session": self.record.session,
            "trajectory": self.trajectory,
            "state": self.state,
            "class": class_of(self.record) if self.state == "complete" else None,
            "versions": list(self.record.versions),
        }
