"""POST /generate, as SGLang's own clients speak it: token ids or a text in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from reef_service.api import common
from reef_service.data_plane.answers import Delta, Done
from reef_service.data_plane.engine_values import TABLE, check
from reef_service.data_plane.prompts import Asked, from_ids, from_text
from reef_service.errors import ApiError, bad_request

router = APIRouter(tags=["data plane"])

# What the gateway does by itself; the rest of what is taken is the table of engine_values.py.
_HANDLED = ("stop", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    text: str | None = None
    input_ids: list[int] | None = Field(None, max_length=10_000_000)
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = False
    return_logprob: bool | None = False


@router.post("/generate", summary="SGLang's own form, streamed or not")
async def generate(body: GenerateRequest, request: Request) -> Response:
    plane = common.plane_of(request)
    params = dict(body.sampling_params or {})
    unknown = sorted(set(params) - set(TABLE) - set(_HANDLED))
    if unknown:
        taken = ", ".join((*TABLE, *_HANDLED))
        raise bad_request(f"sampling_params.{unknown[0]} is not supported; there are {taken}")
    most = params.pop("max_new_tokens", None)
    if params.get("n") is not None:
        check("generate", "n", params.pop("n"))
    session, label = common.session_and_group(request)
    asked = Asked(
        api="generate",
        session=session,
        label=label,
        sampling=common.with_temperature({name: value for name, value in params.items() if name in TABLE}),
        max_tokens=128 if most is None else most,
        stop=_stops(params.get("stop")),
        stream=bool(body.stream),
        size=common.size_of(request),
    )
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("give either text or input_ids, of one prompt")
    if body.input_ids is not None:
        work = from_ids(plane, asked, body.input_ids)
    else:
        work = from_text(plane, asked, body.text or "")
    tokens = await common.prepared(request, asked, work)

    def answer(done: Done) -> dict[str, Any]:
        record, logprobs = done.record, bool(body.return_logprob)
        meta = {
            **done.meta,
            "id": record.receipt,
            "prompt_tokens": len(record.prompt_ids),
            "completion_tokens": len(record.output_ids),
            "reef": done.receipt(),
        }
        if logprobs:
            pairs = zip(record.logprobs, record.output_ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"text": done.answer.raw, "output_ids": list(record.output_ids), "meta_info": meta}

    async def write(events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        so_far = _SoFar(receipt, bool(body.return_logprob))
        async for event in events:
            yield common.event(answer(event) if isinstance(event, Done) else so_far.add(event))
        yield common.event(b"[DONE]")

    if body.stream:
        return await common.respond_stream(request, tokens, write, _error_event)
    return await common.respond(request, tokens, answer)


class _SoFar:
    """An event repeats all that came before, as SGLang's do. It is appended to: rewriting it costs the square."""

    def __init__(self, receipt: str, logprobs: bool) -> None:
        self.receipt, self.with_logprobs = receipt, logprobs
        self.text, self.ids, self.logprobs = bytearray(), bytearray(), bytearray()
        self.count = 0

    def add(self, delta: Delta) -> bytes:
        """The event with this in it, as JSON."""
        comma = b"," if self.count and delta.ids else b""
        self.count += len(delta.ids)
        for piece in delta.pieces:
            self.text += common.dumps(piece.text)[1:-1]
        self.ids += comma + common.dumps(delta.ids)[1:-1]
        meta: dict[str, Any] = {"id": self.receipt, "finish_reason": None, "completion_tokens": self.count}
        parts: list[bytes | bytearray] = [b'{"text":"', self.text, b'","output_ids":[', self.ids, b'],"meta_info":']
        parts.append(common.dumps(meta)[:-1])
        if self.with_logprobs:
            entries = [[logprob, token, None] for logprob, token in zip(delta.logprobs, delta.ids, strict=True)]
            self.logprobs += comma + common.dumps(entries)[1:-1]
            parts += [b',"output_token_logprobs":[', self.logprobs, b"]"]
        return b"".join([*parts, b"}}"])


def _stops(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return common.stop_texts(value)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return common.stop_texts(value)
    raise bad_request("sampling_params.stop must be a text or a list of texts")


def _error_event(error: ApiError) -> bytes:
    return common.event(error.body("/generate"))
