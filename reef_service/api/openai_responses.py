"""POST /v1/responses, as OpenAI's SDKs for agents speak it; its prompts are made as those of chats are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from reef_service.api import common, parameters
from reef_service.api.openai_chat import format_of
from reef_service.api.response_items import Output, to_messages
from reef_service.data_plane.answers import Delta, Done
from reef_service.data_plane.conversations import Conversation
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.prompts import Asked, from_messages
from reef_service.errors import ApiError, bad_request
from reef_service.text.answer_parser import Piece
from reef_service.text.messages import normalise

router = APIRouter(tags=["data plane"])

_REFUSED = {
    "background": "an answer comes with its request",
    "conversation": "give previous_response_id, or the conversation as input",
    "prompt": "give instructions and input",
    "truncation": "a conversation is never cut here",
    "top_logprobs": "log-probs are given for the sampled tokens only, by /v1/chat/completions",
    "max_tool_calls": "the client runs the tools",
    "logit_bias": "it would make the recorded log-probs those of another distribution",
    "stop": "this API has none; use /v1/chat/completions",
}
# A provider runs them where the model asks for it; here it isn't shown them. An answer's `tools` are those that it was.
_HOSTED = ("web_search", "web_search_preview", "image_generation")
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesRequest(common.Sampling):
    model: str | None = None
    input: str | Annotated[list[Any], Field(min_length=1, max_length=16384)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Any = common.engine_value("max_new_tokens")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    store: bool | None = True
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/v1/responses", summary="OpenAI's responses, streamed or not")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    parameters.check(body.model_extra, _REFUSED, ResponsesRequest.model_fields)
    _check_include(body.include or [])
    plane = common.plane_of(request)
    session, label = common.session_and_group(request)
    before = _before(plane, body.previous_response_id)
    tools, custom = _tools(body)
    # Without instructions: those of an earlier request don't hold for this one.
    conversation: list[Mapping[str, Any]] = [
        *(before.messages if before else ()),
        *to_messages(body.input, lambda name: _item(plane, name)),
    ]
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = normalise([*head, *conversation])
    parameters.check_last(messages)
    options = dict(body.chat_template_kwargs or {})
    if (body.reasoning or {}).get("effort") is not None:
        options.setdefault("reasoning_effort", (body.reasoning or {})["effort"])
    asked = Asked(
        api="responses",
        session=session or (before.session if before else ""),
        label=label,
        sampling=body.sampling() | _format(body.text),
        max_tokens=body.max_output_tokens,
        stop=(),
        stream=bool(body.stream),
        size=common.size_of(request),
        one_call=body.parallel_tool_calls is False,
    )
    tokens = await common.prepared(request, asked, from_messages(plane, asked, messages, tools=tools, options=options))
    answer = _Answer(plane, body, conversation, custom)
    if body.stream:
        return await common.respond_stream(request, tokens, answer.write, answer.error_event)
    return await common.respond(request, tokens, answer.whole)


class _Answer:
    """Writes one response, in one piece or as events."""

    def __init__(
        self, plane: DataPlane, body: ResponsesRequest, conversation: list[Mapping[str, Any]], custom: frozenset[str]
    ) -> None:
        self.plane, self.body, self.conversation, self.custom = plane, body, conversation, custom
        self.created, self.number = common.now(), 0

    def whole(self, done: Done) -> dict[str, Any]:
        answer, output = done.answer, Output(done.record.receipt, self.custom)
        if answer.reasoning:
            output.push(Piece("reasoning", answer.reasoning))
        if answer.content or not (answer.calls or answer.reasoning):
            output.push(Piece("content", answer.content))
        for call in answer.calls:
            output.push(Piece("tool_call", call=call))
        output.close("incomplete" if done.finish == "length" else "completed")
        return self._ended(done, output)

    async def write(self, events: AsyncIterator[Delta | Done], receipt: str) -> AsyncIterator[bytes]:
        output = Output(receipt, self.custom)
        begun = self._response(receipt, "in_progress", [])
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        async for event in events:
            if isinstance(event, Delta):
                for piece in event.pieces:
                    for data in output.push(piece):
                        yield self._event(data)
                continue
            cut = event.finish == "length"
            for data in output.close("incomplete" if cut else "completed"):
                yield self._event(data)
            kind = "response.incomplete" if cut else "response.completed"
            yield self._event({"type": kind, "response": self._ended(event, output)})

    def error_event(self, error: ApiError) -> bytes:
        fault = error.body("/v1/responses")["error"]
        shown = {"code": fault["code"] or fault["type"], "message": fault["message"], "param": fault["param"]}
        return self._event({"type": "error", **shown, "error": fault})

    def _event(self, data: dict[str, Any]) -> bytes:
        data["sequence_number"] = self.number
        self.number += 1
        return common.event(data, data["type"])

    def _ended(self, done: Done, output: Output) -> dict[str, Any]:
        receipt, cut = done.record.receipt, done.finish == "length"
        if self.body.store is not False:
            items = {item["id"]: item for item in output.items}
            messages = [*self.conversation, *to_messages(output.items, lambda name: None)]
            self.plane.conversations.keep(receipt, Conversation(done.record.session, messages, items))
        prompt, sampled = len(done.record.prompt_ids), len(done.record.output_ids)
        return {
            **self._response(receipt, "incomplete" if cut else "completed", output.items),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": done.cached_tokens},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": self._count(done.answer.reasoning)},
                "total_tokens": prompt + sampled,
            },
            "reef": done.receipt(),
        }

    def _count(self, reasoning: str) -> int:
        return len(self.plane.tokenizer.encode(reasoning)) if reasoning else 0

    def _response(self, receipt: str, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        return {
            "id": f"resp_{receipt}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.plane.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") not in _HOSTED],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


def _check_include(include: list[str]) -> None:
    """Reasoning comes as it is, so nothing encrypted is missing; what else can be included needs a provider's tools."""
    if "message.output_text.logprobs" in include:
        raise bad_request("include: log-probs are given by /v1/chat/completions", "include")


def _before(plane: DataPlane, name: str | None) -> Conversation | None:
    if name is None:
        return None
    found = plane.conversations.get(name.removeprefix("resp_"))
    if found is None:
        raise ApiError(
            404,
            f"previous_response_id {name[:100]!r} isn't kept here (store=false, another gateway, restarted, or too "
            "long ago); send the conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _item(plane: DataPlane, name: str) -> Mapping[str, Any] | None:
    """An item of an earlier answer; its id is KIND_RECEIPT_NUMBER."""
    parts = name.split("_")
    found = plane.conversations.get(parts[1]) if len(parts) == 3 else None
    return found.items.get(name) if found else None


def _tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """(tools in the form of chats, names of those that take a text). Raises ApiError 400."""
    if body.tool_choice == "none":
        return [], frozenset()
    if body.tool_choice not in (None, "auto"):
        raise bad_request(
            "tool_choice must be auto or none: a forced call isn't what the model would sample", "tool_choice"
        )
    found, custom = [], set()
    for i, tool in enumerate(body.tools or ()):
        kind = tool.get("type")
        if kind in _HOSTED:
            continue
        if kind not in ("function", "custom"):
            raise bad_request(
                f"tools[{i}] is of type {str(kind)[:60]!r}; only the client's own tools work here", "tools"
            )
        if not isinstance(tool.get("name"), str):
            raise bad_request(f"tools[{i}].name is missing", "tools")
        if kind == "custom":
            custom.add(tool["name"])
        shape = _INPUT if kind == "custom" else tool.get("parameters") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": shape}
        found.append({"type": "function", "function": function})
    return found, frozenset(custom)


def _format(text: Mapping[str, Any] | None) -> dict[str, Any]:
    wanted = (text or {}).get("format")
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": wanted}
    if wanted is not None and not isinstance(wanted, Mapping):
        raise bad_request("text.format must be an object", "text")
    return format_of(dict(wanted) if wanted else None)
