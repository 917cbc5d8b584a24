"""Items of the Responses API: input items to messages, and an answer's pieces to output items."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reef_service.errors import bad_request
from reef_service.text.answer_parser import Piece, ToolCall
from reef_service.text.messages import text_of

Find = Callable[[str], Mapping[str, Any] | None]  # an earlier answer's item, by its id


def to_messages(given: str | Sequence[Any], find: Find) -> list[dict[str, Any]]:
    """OpenAI's messages for chats. Reasoning, text and calls that follow each other are one answer, hence one message,
    as they were when they were sampled. Raises ApiError 400."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if isinstance(item, Mapping) and item.get("type") == "item_reference":
            name = str(item.get("id"))[:100]
            item = find(name)
            if item is None:
                raise bad_request(f"{where} refers to {name!r}, which isn't kept here any more; send the item", "input")
        if not isinstance(item, Mapping):
            raise bad_request(f"{where} must be an object", "input")
        _add(found, item, where)
    return found


def _add(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") != "assistant":
        found.append({"role": item.get("role"), "content": text_of(item.get("content"), f"{where}.content")})
    elif kind == "message":
        _answer(found)["content"] += text_of(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))
        message = _answer(found)
        message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif kind == "function_call":
        _call(found, item, item.get("arguments"))
    elif kind == "custom_tool_call":
        _call(found, item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = text_of(item.get("output"), f"{where}.output")
        found.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
    else:
        raise bad_request(
            f"{where} is of type {str(kind)[:60]!r}; this gateway takes messages, calls and reasoning", "input"
        )


def _answer(found: list[dict[str, Any]]) -> dict[str, Any]:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _call(found: list[dict[str, Any]], item: Mapping[str, Any], arguments: Any) -> None:
    function = {"name": item.get("name"), "arguments": arguments}
    _answer(found).setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})


class Output:
    """The output items of one answer, and the events that give them while it comes."""

    def __init__(self, receipt: str, custom: frozenset[str]) -> None:
        """`custom`: names of tools that take a text instead of JSON."""
        self.receipt, self.custom = receipt, custom
        self.items: list[dict[str, Any]] = []
        self._open = ""  # the kind of the item that still grows

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.call is not None:
            return [*self.close(), *self._call(piece.call)]
        events: list[dict[str, Any]] = []
        if self._open != piece.kind:
            events = [*self.close(), *self._begin(piece.kind)]
        item = self.items[-1]
        item["content"][0]["text"] += piece.text
        delta = {**self._place("content"), "delta": piece.text}
        return [*events, {"type": f"response.{self._text_event()}.delta", **delta, **self._logprobs()}]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open."""
        if not self._open:
            return []
        item, place = self.items[-1], self._place("content")
        item["status"] = status
        part = item["content"][0]
        events = [
            {"type": f"response.{self._text_event()}.done", **place, "text": part["text"], **self._logprobs()},
            {"type": "response.content_part.done", **place, "part": part},
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": item},
        ]
        self._open = ""
        return events

    def _text_event(self) -> str:
        return "reasoning_text" if self._open == "reasoning" else "output_text"

    def _logprobs(self) -> dict[str, Any]:
        return {} if self._open == "reasoning" else {"logprobs": []}

    def _place(self, content: str = "") -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if content else place

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        reasoning = kind == "reasoning"
        item: dict[str, Any] = {
            "id": f"{'rs' if reasoning else 'msg'}_{self.receipt}_{len(self.items)}",
            "type": "reasoning" if reasoning else "message",
            "status": "in_progress",
            "content": [],
        }
        own: dict[str, Any] = {"summary": []} if reasoning else {"role": "assistant"}
        item |= own
        self.items.append(item)
        self._open = kind
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}
        part: dict[str, Any] = {"type": "reasoning_text" if reasoning else "output_text", "text": ""}
        part |= {} if reasoning else {"annotations": [], "logprobs": []}
        item["content"].append(part)
        return [added, {"type": "response.content_part.added", **self._place("content"), "part": dict(part)}]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        custom = call.name in self.custom
        field, value = ("input", _input(call)) if custom else ("arguments", call.arguments)
        item = {
            "id": f"{'ctc' if custom else 'fc'}_{self.receipt}_{len(self.items)}",
            "type": "custom_tool_call" if custom else "function_call",
            "call_id": call.id,
            "name": call.name,
            field: "",
            "status": "in_progress",
        }
        self.items.append(item)
        index = {"output_index": len(self.items) - 1}
        added = {"type": "response.output_item.added", **index, "item": dict(item)}
        item |= {field: value, "status": "completed"}
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        done = {"type": f"{name}.done", **self._place(), field: value, **({} if custom else {"name": call.name})}
        delta = {"type": f"{name}.delta", **self._place(), "delta": value}
        return [added, delta, done, {"type": "response.output_item.done", **index, "item": item}]


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "content": []}


def _input(call: ToolCall) -> str:
    arguments = json.loads(call.arguments)
    given = arguments.get("input") if isinstance(arguments, dict) else None
    return given if isinstance(given, str) else call.arguments
