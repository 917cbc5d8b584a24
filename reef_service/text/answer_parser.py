"""An answer's text, cut into reasoning, content and tool calls while it comes.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call> ...

This is the form of Qwen, Hermes and the models that follow them; the gateway uses it where the model's chat template
writes these tags. A tool call is given complete, once it is closed. What looks like one and isn't JSON with a name is
content, as it stands: nothing that a model wrote is lost.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from reef_service.text import json_text

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one kind, or a tool call."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None


class AnswerParser:
    """push(text) ... push(text), finish(): the pieces of one answer, in order."""

    def __init__(self, *, reasoning: bool, tools: bool, thinking_already: bool = False) -> None:
        """`thinking_already`: the prompt ends inside <think>, so the answer begins there."""
        self.tools = tools
        self._tags = [tag for tag, wanted in ((THINK, reasoning), (CALL, tools)) if wanted]
        self._mode: Literal["reasoning", "content", "tool_call"] = "reasoning" if thinking_already else "content"
        self._rest = ""
        self._begun = False  # some content that isn't blank, or a call, is out
        self._blanks = ""  # what stood before <tool_call>
        self._trim = False  # blanks at the beginning of what comes next belong to a tag

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        found = self.push("")
        if self._mode == "tool_call":
            self._no_call(found, self._rest)
        else:
            self._give(found, self._rest)
        self._rest = ""
        return found

    def _step(self, found: list[Piece]) -> bool:
        """Handle the text up to the next tag; False where more text is needed."""
        if self._mode == "tool_call":
            body, tag, after = self._rest.partition(END_CALL)
            if not tag:
                return False
            self._rest, self._mode = after, "content"
            call = parse_call(body)
            if call is None:
                self._no_call(found, body + END_CALL)
            else:
                found.append(Piece("tool_call", call=call))
                self._begun = self._trim = True
            return True
        tags = [END_THINK] if self._mode == "reasoning" else [t for t in self._tags if t != THINK or not self._begun]
        places = [(self._rest.find(tag), tag) for tag in tags if tag in self._rest]
        if not places:
            kept = held(self._rest, tags, blanks=CALL in tags or END_THINK in tags)
            ready, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
            self._give(found, ready)
            return False
        place, tag = min(places)
        if tag == THINK and self._rest[:place].strip():
            self._begun = True  # a tag in the middle of an answer is talk about tags
            return True
        before, self._rest = self._rest[:place], self._rest[place + len(tag) :]
        if tag != THINK:
            self._give(found, before.rstrip())
            self._blanks = before[len(before.rstrip()) :]
        self._mode = {THINK: "reasoning", END_THINK: "content", CALL: "tool_call"}[tag]  # type: ignore[assignment]
        self._trim = True
        return True

    def _no_call(self, found: list[Piece], text: str) -> None:
        """Give what began like a call as content, unchanged."""
        self._mode, self._trim = "content", False
        self._give(found, self._blanks + CALL + text)

    def _give(self, found: list[Piece], text: str) -> None:
        if self._trim:
            text = text.lstrip("\n") if self._mode == "reasoning" else text.lstrip()
        if not text:
            return
        self._trim = False
        self._begun = self._begun or (self._mode == "content" and bool(text.strip()))
        found.append(Piece(self._mode, text))


def parse_call(text: str) -> ToolCall | None:
    """The call that a <tool_call> holds; None where it isn't one."""
    try:
        data = json_text.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json_text.loads(arguments)
        except ValueError:
            return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", data["name"], json.dumps(arguments, ensure_ascii=False))


def held(text: str, tags: list[str], *, blanks: bool = False) -> int:
    """How many characters at the end of `text` may be the beginning of a tag; with `blanks`, blanks before it too."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                longest = max(longest, size)
                break
    if blanks:
        longest = len(text) - len(text[: len(text) - longest].rstrip())
    return longest
