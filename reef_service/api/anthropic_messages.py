"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from reef_service.api import common, parameters
from reef_service.data_plane.answers import Answer, Delta, Done, TokenRequest
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.prompts import Asked, from_messages
from reef_service.errors import ApiError, bad_request
from reef_service.text.answer_parser import THINK, Piece
from reef_service.text.messages import normalise, text_of

router = APIRouter(tags=["data plane"])

_REFUSED = {
    "mcp_servers": "only the client's own tools work here",
    "container": "only the client's own tools work here",
}


class MessagesRequest(common.Sampling):
    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Any = common.engine_value("max_new_tokens")
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


@router.post("/v1/messages", summary="Anthropic's messages, streamed or not")
async def messages(body: MessagesRequest, request: Request) -> Response:
    plane = common.plane_of(request)
    session, label = common.session_and_group(request)
    if body.max_tokens is None:
        raise bad_request("max_tokens is missing", "max_tokens")
    asked = Asked(
        api="messages",
        session=session,
        label=label,
        sampling=body.sampling() | _format(body),
        max_tokens=body.max_tokens,
        stop=common.stop_texts(body.stop_sequences),
        stream=bool(body.stream),
        size=common.size_of(request),
        one_call=bool((body.tool_choice or {}).get("disable_parallel_tool_use")),
    )
    tokens = await common.prepared(request, asked, _work(plane, asked, body))

    def head(receipt: str, content: list[Any], prompt: int, output: int) -> dict[str, Any]:
        return {
            "id": f"msg_{receipt}",
            "type": "message",
            "role": "assistant",
            "model": plane.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt, "output_tokens": output, "cache_read_input_tokens": 0},
        }

    def render(done: Done) -> dict[str, Any]:
        record = done.record
        return {
            **head(record.receipt, _blocks(done.answer), len(record.prompt_ids), len(record.output_ids)),
            **_end(done),
            "usage": _usage(done),
            "reef": done.receipt(),
        }

    async def write(events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        start = {"type": "message_start", "message": head(receipt, [], len(tokens.prompt_ids), 0)}
        yield common.event(start, "message_start")
        blocks = _Blocks()
        async for event in events:
            if isinstance(event, Delta):
                for piece in event.pieces:
                    for written in blocks.write(piece):
                        yield written
                continue
            for written in blocks.close():
                yield written
            delta = {"type": "message_delta", "delta": _end(event), "usage": _usage(event)}
            yield common.event(delta, "message_delta")
            yield common.event({"type": "message_stop", "reef": event.receipt()}, "message_stop")

    if body.stream:
        return await common.respond_stream(request, tokens, write, _error_event)
    return await common.respond(request, tokens, render)


@router.post("/v1/messages/count_tokens", summary="How many tokens a prompt has")
async def count_tokens(body: MessagesRequest, request: Request) -> JSONResponse:
    asked = Asked("messages", "", "", {}, 1, (), False, common.size_of(request))
    tokens = await common.prepared(request, asked, _work(common.plane_of(request), asked, body))
    return JSONResponse({"input_tokens": len(tokens.prompt_ids)})


def _work(plane: DataPlane, asked: Asked, body: MessagesRequest) -> Coroutine[Any, Any, TokenRequest]:
    """Check what no field has, and make the prompt."""
    parameters.check(body.model_extra, _REFUSED, MessagesRequest.model_fields)
    conversation = _messages(body)
    parameters.check_last(conversation)
    return from_messages(plane, asked, conversation, tools=_tools(body), options=_thinking(plane, body))


def _thinking(plane: DataPlane, body: MessagesRequest) -> dict[str, Any]:
    """`disabled` is the template's to do: by the switch that Qwen's and GLM's have. A budget is only a bound of what a
    model may think, and one that is there in any case by max_tokens."""
    if (body.thinking or {}).get("type") != "disabled" or plane.tokenizer.template is None:
        return {}
    source = plane.tokenizer.template.source
    if "enable_thinking" in source:
        return {"enable_thinking": False}
    if THINK in source:
        raise bad_request("thinking can't be disabled: the model's chat template has no switch for it", "thinking")
    return {}


def _format(body: MessagesRequest) -> dict[str, Any]:
    """SGLang's constraint for output_config.format; needs engines with a grammar backend."""
    for name, value in (body.output_config or {}).items():
        if name not in ("format", "effort") and value is not None:
            raise bad_request(f"output_config.{name[:60]} is not supported; leave it out", "output_config")
    wanted = (body.output_config or {}).get("format")
    if wanted is None:
        return {}
    if (
        not isinstance(wanted, dict)
        or wanted.get("type") != "json_schema"
        or not isinstance(wanted.get("schema"), dict)
    ):
        raise bad_request("output_config.format must be a json_schema with a schema", "output_config")
    return {"json_schema": json.dumps(wanted["schema"])}


def _tools(body: MessagesRequest) -> list[dict[str, Any]]:
    kind = (body.tool_choice or {}).get("type", "auto")
    if kind == "none":
        return []
    if kind != "auto":
        raise bad_request(
            "tool_choice must be auto or none: a forced call isn't what the model would sample", "tool_choice"
        )
    found = []
    for i, tool in enumerate(body.tools or ()):
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(
                f"tools[{i}] needs a name and an input_schema; only the client's own tools work here", "tools"
            )
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool["input_schema"],
        }
        found.append({"type": "function", "function": function})
    return found


def _messages(body: MessagesRequest) -> list[dict[str, Any]]:
    """Convert to OpenAI's form, then to ours."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": text_of(body.system, "system")})
    for i, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"messages[{i}].role is {role!r}; there are user and assistant", "messages")
        where = f"messages[{i}].content"
        if role == "system":  # Claude Code sends some of its own in the middle of a conversation
            found.append({"role": "system", "content": text_of(content, where)})
            continue
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        found += (_from_assistant if role == "assistant" else _from_user)(blocks, where)
    return normalise(found)


def _from_assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    text, reasoning, calls = [], [], []
    for j, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            text.append(text_of([block], f"{where}[{j}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _from_user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Tool results are messages of their own, before the rest of the user's message."""
    results, text = [], []
    for j, block in enumerate(blocks):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            content = text_of(block.get("content"), f"{where}[{j}].content")
            results.append({"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            text.append(text_of([block], f"{where}[{j}]"))
    return [*results, *([{"role": "user", "content": "".join(text)}] if text or not results else [])]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if answer.reasoning:
        found.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        found.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return found


def _end(done: Done) -> dict[str, Any]:
    if done.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_text}
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(done.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(done: Done) -> dict[str, int]:
    return {
        "input_tokens": len(done.record.prompt_ids) - done.cached_tokens,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": len(done.record.output_ids),
    }


class _Blocks:
    """Writes content blocks: one opens when a piece of another kind comes, and closes before the next."""

    def __init__(self) -> None:
        self.index, self.kind = -1, ""

    def write(self, piece: Piece) -> list[bytes]:
        if piece.call is not None:
            call = piece.call
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            return [*self._open("tool_use", block), self._delta(delta), *self.close()]
        if piece.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            return [*self._open("thinking", block), self._delta({"type": "thinking_delta", "thinking": piece.text})]
        opened = self._open("text", {"type": "text", "text": ""})
        return [*opened, self._delta({"type": "text_delta", "text": piece.text})]

    def close(self) -> list[bytes]:
        if not self.kind:
            return []
        self.kind = ""
        return [common.event({"type": "content_block_stop", "index": self.index}, "content_block_stop")]

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self.kind == kind:
            return []
        closed = self.close()
        self.index, self.kind = self.index + 1, kind
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*closed, common.event(start, "content_block_start")]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return common.event({"type": "content_block_delta", "index": self.index, "delta": delta}, "content_block_delta")


def _error_event(error: ApiError) -> bytes:
    return common.event(error.body("/v1/messages"), "error")
