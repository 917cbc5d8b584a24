"""What later requests of the Responses API may refer to: an answer with all that came before it, by its id.

Kept in memory, the latest ones: a client that names an older one gets a clear error, and sends the conversation itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 4096
MOST_CHARACTERS = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation up to an answer and with it, without instructions, which belong to one request."""

    session: str
    messages: Sequence[Mapping[str, Any]]  # in OpenAI's form for chats
    items: Mapping[str, Mapping[str, Any]]  # of the answer, by their ids

    @property
    def characters(self) -> int:
        return sum(len(message.get("content") or "") for message in self.messages)


class Conversations:
    """Used inside one event loop."""

    def __init__(self, most: int = MOST, characters: int = MOST_CHARACTERS) -> None:
        self.most, self.most_characters = most, characters
        self._kept: OrderedDict[str, tuple[Conversation, int]] = OrderedDict()
        self._characters = 0

    def keep(self, name: str, conversation: Conversation) -> None:
        size = conversation.characters
        self._kept[name] = conversation, size
        self._characters += size
        while len(self._kept) > 1 and (len(self._kept) > self.most or self._characters > self.most_characters):
            self._characters -= self._kept.popitem(last=False)[1][1]

    def get(self, name: str) -> Conversation | None:
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]
