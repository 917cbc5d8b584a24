"""Messages in the one form that templates take and histories are identified by.

{"role": ..., "content": text, "reasoning_content": ..., "tool_calls": [{"function": {"name", "arguments": {}}}], ...}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from reef_service.errors import bad_request
from reef_service.text import json_text

ROLES = ("system", "user", "assistant", "tool")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages in our form. Raises ApiError 400."""
    if not messages:
        raise bad_request("messages is empty; give at least one", "messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if isinstance(role, str):
        role = {"developer": "system", "function": "tool"}.get(role, role)
    if role not in ROLES:
        raise bad_request(f"{where}.role is {role!r}; there are {', '.join(ROLES)}", where)
    found: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            found["reasoning_content"] = reasoning
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list", where)
        if calls:
            found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            found[name] = message[name]
    return found


def text_of(content: Any, where: str) -> str:
    """A message's content: a text, or parts that are texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise bad_request(f"{where} must be a text or a list of parts", where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text") or part.get("refusal") or ""
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise bad_request(f"{where} is of type {kind!r}; this gateway takes text only", where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function.name is missing", where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # A model may write anything, and a client hands it back; the template shows it as it is.
        with suppress(ValueError):
            arguments = json_text.loads(arguments)
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def digests(messages: Sequence[Mapping[str, Any]], head: Any) -> list[str]:
    """Entry n stands for the first n messages after `head` (tools and whatever else the prompt begins with).

    What a client may drop or rename when it hands an answer back is left out: reasoning, the ids of calls.
    """
    state = hashlib.sha256(_json(head))
    found = [state.hexdigest()]
    for message in messages:
        state.update(b"\0" + _json(_identity(message)))
        found.append(state.hexdigest())
    return found


def _identity(message: Mapping[str, Any]) -> list[Any]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return [message["role"], message["content"] or "", calls]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
