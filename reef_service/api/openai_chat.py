"""POST /v1/chat/completions, as OpenAI's clients speak it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from reef_service.api import common, parameters
from reef_service.data_plane.answers import Delta, Done, TokenRequest
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.prompts import Asked, from_messages
from reef_service.errors import ApiError, bad_request
from reef_service.text.answer_parser import Piece
from reef_service.text.messages import normalise

router = APIRouter(tags=["data plane"])

_REFUSED = {
    "n": "each answer is a turn of its own; send the request n times",
    "top_logprobs": "log-probs are given for the sampled tokens only",
    "logit_bias": "it would make the recorded log-probs those of another distribution",
    "functions": "give `tools`",
    "function_call": "give `tool_choice`",
}


class ChatRequest(common.Sampling):
    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    max_tokens: Any = common.engine_value("max_new_tokens")
    max_completion_tokens: Any = common.engine_value("max_new_tokens")
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/v1/chat/completions", summary="A chat, streamed or not")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    asked = await _asked(body, request)
    if body.stream:
        usage = bool((body.stream_options or {}).get("include_usage"))
        writer = _Chunks(common.plane_of(request), bool(body.logprobs), usage)
        return await common.respond_stream(request, asked, writer.write, error_event)
    plane = common.plane_of(request)
    return await common.respond(
        request,
        asked,
        lambda done: {
            "id": f"chatcmpl-{done.record.receipt}",
            "object": "chat.completion",
            "created": common.now(),
            "model": plane.model,
            "choices": [
                {
                    "index": 0,
                    "message": _message(done),
                    "logprobs": (
                        token_logprobs(plane, done.record.output_ids, done.record.logprobs) if body.logprobs else None
                    ),
                    "finish_reason": finish_reason(done),
                }
            ],
            "usage": usage_of(done),
            "reef": done.receipt(),
        },
    )


async def _asked(body: ChatRequest, request: Request) -> TokenRequest:
    parameters.check(body.model_extra, _REFUSED, ChatRequest.model_fields)
    tools = _tools(body)
    sampling = body.sampling() | format_of(body.response_format)
    session, label = common.session_and_group(request)
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    asked = Asked(
        api="chat",
        session=session,
        label=label,
        sampling=sampling,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=common.stop_texts(body.stop),
        stream=bool(body.stream),
        size=common.size_of(request),
        one_call=body.parallel_tool_calls is False,
    )
    plane = common.plane_of(request)
    conversation = normalise(body.messages)
    parameters.check_last(conversation)
    work = from_messages(plane, asked, conversation, tools=tools, options=options)
    return await common.prepared(request, asked, work)


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    if body.tool_choice == "none":
        return []
    if body.tool_choice not in (None, "auto"):
        raise bad_request(
            "tool_choice must be auto or none: a forced call isn't what the model would sample", "tool_choice"
        )
    for i, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{i}].function.name is missing", "tools")
    return body.tools or []


def format_of(wanted: dict[str, Any] | None) -> dict[str, Any]:
    """SGLang's constraint for a response_format; needs engines with a grammar backend."""
    kind = (wanted or {}).get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    schema = ((wanted or {}).get("json_schema") or {}).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise bad_request("response_format must be text, json_object, or json_schema with a schema", "response_format")
    return {"json_schema": json.dumps(schema)}


class _Chunks:
    """Writes chat.completion.chunk events. The receipt is in the one with finish_reason: by then all is stored."""

    def __init__(self, plane: DataPlane, logprobs: bool, usage: bool) -> None:
        self.plane, self.logprobs, self.usage = plane, logprobs, usage
        self.calls = 0

    async def write(self, events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        head = {
            "id": f"chatcmpl-{receipt}",
            "object": "chat.completion.chunk",
            "created": common.now(),
            "model": self.plane.model,
        }

        def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return common.event({**head, "choices": [choice], **more})

        yield chunk({"role": "assistant", "content": ""})
        async for event in events:
            if isinstance(event, Delta):
                logprobs = token_logprobs(self.plane, event.ids, event.logprobs) if self.logprobs else None
                deltas = [self._delta(piece) for piece in event.pieces] or ([{}] if logprobs else [])
                for i, delta in enumerate(deltas):
                    yield chunk(delta, logprobs=logprobs if i == 0 else None)
                continue
            yield chunk({}, finish_reason(event), reef=event.receipt())
            if self.usage:
                yield common.event({**head, "choices": [], "usage": usage_of(event)})
        yield common.event(b"[DONE]")

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is not None:
            self.calls += 1
            return {"tool_calls": [{"index": self.calls - 1, **piece.call.to_json()}]}
        return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def _message(done: Done) -> dict[str, Any]:
    answer = done.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [call.to_json() for call in answer.calls]
    return message


def finish_reason(done: Done) -> Literal["stop", "length", "tool_calls"]:
    return done.finish if done.finish in ("length", "tool_calls") else "stop"  # type: ignore[return-value]


def usage_of(done: Done) -> dict[str, Any]:
    prompt, output = len(done.record.prompt_ids), len(done.record.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def token_logprobs(plane: DataPlane, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """OpenAI's form for sampled tokens."""
    rows = []
    for token, logprob in zip(ids, logprobs, strict=True):
        text = plane.tokenizer.text_of(token)
        rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows, "refusal": None}


def error_event(error: ApiError) -> bytes:
    return common.event(error.body("/v1/chat/completions"))
