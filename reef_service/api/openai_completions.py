"""POST /v1/completions and GET /v1/models, as OpenAI's clients speak them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from reef_service.api import common, parameters
from reef_service.api.openai_chat import error_event, finish_reason, usage_of
from reef_service.data_plane.answers import Delta, Done
from reef_service.data_plane.prompts import Asked, from_ids, from_text
from reef_service.errors import ApiError, bad_request

router = APIRouter(tags=["data plane"])

_REFUSED = {
    "n": "each answer is a turn of its own; send the request n times",
    "best_of": "send the request several times",
    "echo": "the prompt is what was sent",
    "suffix": "the model continues a text, it fills no gaps",
    "logit_bias": "it would make the recorded log-probs those of another distribution",
}


class CompletionRequest(common.Sampling):
    model: str | None = None
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Any = common.engine_value("max_new_tokens")
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: int | None = Field(None, ge=0, le=0, description="0: of the sampled tokens")


@router.post("/v1/completions", summary="A text or token ids to go on with, streamed or not")
async def completions(body: CompletionRequest, request: Request) -> Response:
    parameters.check(body.model_extra, _REFUSED, CompletionRequest.model_fields)
    plane = common.plane_of(request)
    session, label = common.session_and_group(request)
    asked = Asked(
        api="completions",
        session=session,
        label=label,
        sampling=body.sampling(),
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        stop=common.stop_texts(body.stop),
        stream=bool(body.stream),
        size=common.size_of(request),
    )
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise bad_request(f"{len(prompt)} prompts in one request; send one request for each", "prompt")
        prompt = prompt[0]
    work = (from_text if isinstance(prompt, str) else from_ids)(plane, asked, prompt)
    tokens = await common.prepared(request, asked, work)

    def token_logprobs(ids: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        texts = [plane.tokenizer.text_of(i) for i in ids]
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }

    def choice(text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def head(receipt: str) -> dict[str, Any]:
        return {"id": f"cmpl-{receipt}", "object": "text_completion", "created": common.now(), "model": plane.model}

    async def write(events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        shared, offset = head(receipt), 0
        async for event in events:
            if isinstance(event, Delta):
                text = "".join(piece.text for piece in event.pieces)
                logprobs = None
                if body.logprobs is not None and event.ids:
                    logprobs = token_logprobs(event.ids, event.logprobs, offset)
                    offset += sum(map(len, logprobs["tokens"]))
                if text or logprobs:
                    yield common.event({**shared, "choices": [choice(text, None, logprobs)]})
                continue
            last = {**shared, "choices": [choice("", finish_reason(event))], "reef": event.receipt()}
            yield common.event(last)
            if (body.stream_options or {}).get("include_usage"):
                yield common.event({**shared, "choices": [], "usage": usage_of(event)})
        yield common.event(b"[DONE]")

    if body.stream:
        return await common.respond_stream(request, tokens, write, error_event)

    def render(done: Done) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None:
            logprobs = token_logprobs(done.record.output_ids, done.record.logprobs, 0)
        answer = choice(done.answer.content, finish_reason(done), logprobs)
        return {
            **head(done.record.receipt),
            "choices": [answer],
            "usage": usage_of(done),
            "reef": done.receipt(),
        }

    return await common.respond(request, tokens, render)


@router.get("/v1/models", summary="The model and its weight version")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{name:path}", summary="The model, by its name")
async def model(name: str, request: Request) -> dict[str, Any]:
    found = _model(request)
    if name != found["id"]:
        raise ApiError(
            404, f"there is no model {name[:200]!r}; this gateway has {found['id']!r}", code="model_not_found"
        )
    return found


def _model(request: Request) -> dict[str, Any]:
    plane = common.plane_of(request)
    return {"id": plane.model, "object": "model", "created": 0, "owned_by": "reef-slime", "root": plane.fleet.version}
