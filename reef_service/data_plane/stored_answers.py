"""An answer as it is kept for requests that come again: what its turn doesn't hold of it, as JSON."""

from __future__ import annotations

import json
from typing import Any

from reef_service.data_plane.answers import Answer, Done
from reef_service.store.repeats import StoredAnswer
from reef_service.text.answer_parser import Piece, ToolCall
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KV_PROVENANCE_KEY, PREFILLS_KEY, SAMPLED_SPANS_KEY

_IN_RECORD = {SAMPLED_SPANS_KEY: "spans", KV_PROVENANCE_KEY: "segments", PREFILLS_KEY: "prefills"}


def to_text(answer: Answer, finish: str, stop_text: str | None, meta: dict[str, Any]) -> str:
    """The JSON of an answer."""
    kept = {
        "pieces": [_plain(piece) for piece in _joined(answer.pieces)],
        "raw": answer.raw,
        "finish": finish,
        "stop_text": stop_text,
        "meta": {name: value for name, value in meta.items() if name not in _IN_RECORD},
    }
    return json.dumps(kept, separators=(",", ":"))


def done_of(stored: StoredAnswer) -> Done:
    """The end of an exchange that was stored."""
    kept = json.loads(stored.answer)
    answer = Answer(raw=kept["raw"])
    for piece in kept["pieces"]:
        answer.add(_piece(piece))
    meta = {**kept["meta"], **_provenance(stored.record)}
    return Done(
        stored.record,
        stored.state,
        answer,
        kept["finish"],
        kept["stop_text"],
        int(meta.get("cached_tokens") or 0),
        meta,
        stored.trajectory,
    )


def _provenance(record: RolloutRecord) -> dict[str, Any]:
    return {key: [item.to_json() for item in getattr(record, name)] for key, name in _IN_RECORD.items()}


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    found: list[Piece] = []
    texts: list[str] = []
    for piece in [*pieces, None]:
        if texts and (piece is None or piece.kind != found[-1].kind or piece.call is not None):
            found[-1] = Piece(found[-1].kind, "".join(texts))
            texts = []
        if piece is not None:
            if not texts:
                found.append(piece)
            if piece.call is None:
                texts.append(piece.text)
    return found


def _plain(piece: Piece) -> list[str]:
    call = piece.call
    return [piece.kind, piece.text] if call is None else [piece.kind, call.id, call.name, call.arguments]


def _piece(plain: list[str]) -> Piece:
    if plain[0] == "tool_call":
        return Piece("tool_call", call=ToolCall(*plain[1:]))
    return Piece(plain[0], plain[1])  # type: ignore[arg-type]
