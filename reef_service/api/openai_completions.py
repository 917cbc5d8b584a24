"""POST /v1/completions and GET /v1/models, as OpenAI's clients speak them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from reef_service.api import common
from reef_service.api.openai_chat import error_event, finish_reason, usage_of
from reef_service.data_plane.answers import Delta, Done
from reef_service.data_plane.prompts import Asked, from_ids, from_text
from reef_service.errors import bad_request

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
    common.refuse(body.model_extra or {}, _REFUSED)
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

    def choice(text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def head(receipt: str) -> dict[str, Any]:
        return {"id": f"cmpl-{receipt}", "object": "text_completion", "created": common.now(), "model": plane.model}

    async def write(events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        shared = head(receipt)
        async for event in events:
            if isinstance(event, Delta):
                text = "".join(piece.text for piece in event.pieces)
                if text:
                    yield common.event({**shared, "choices": [choice(text, None)]})
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
            tokens = [plane.tokenizer.text_of(i) for i in done.record.output_ids]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": list(done.record.logprobs),
                "top_logprobs": None,
                "text_offset": [0, *accumulate(map(len, tokens))][: len(tokens)],
            }
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
    plane = common.plane_of(request)
    one = {"id": plane.model, "object": "model", "created": 0, "owned_by": "reef-slime", "root": plane.fleet.version}
    return {"object": "list", "data": [one]}
