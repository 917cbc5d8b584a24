"""Which turn of a session a new request goes on from: the one whose conversation is its beginning, the longest such.

Kept in memory for the sessions used last, read from the store for the others, so a restarted gateway goes on where the
one before ended.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from reef_service.store import Store
from reef_service.store.turns import History

# (kind of history, number of items) -> digest of that many items of the new request; None where it has fewer
DigestOf = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class Parent:
    """The turn that a request goes on from, with all its tokens."""

    receipt: str
    history: History
    tokens: list[int]


@dataclass(slots=True)
class _Session:
    turns: dict[str, tuple[History, int]] = field(default_factory=dict)  # receipt -> its history, number of its tokens


class Sessions:
    """`most`: sessions kept in memory; `tokens`: of their last turns, over all sessions."""

    def __init__(self, store: Store, *, most: int, tokens: int) -> None:
        self.store, self.most, self.most_tokens = store, most, tokens
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()
        self._held = 0  # tokens

    def __len__(self) -> int:
        return len(self._sessions)

    async def parent(self, session: str, kind: str, digest_of: DigestOf) -> Parent | None:
        """The longest turn of `session` that the request begins with."""
        known = await self._of(session)
        mine = [
            (history, tokens, receipt)
            for receipt, (history, tokens) in reversed(known.turns.items())  # of two alike the later one
            if history.kind == kind
        ]
        mine.sort(key=lambda entry: (entry[0].length, entry[1]), reverse=True)
        for history, _, receipt in mine:
            if digest_of(history.length) == history.digest:
                tokens_of = await self._tokens_of(receipt)
                return None if tokens_of is None else Parent(receipt, history, tokens_of)
        return None

    def forget(self, names: Iterable[str]) -> None:
        """Sessions that were removed from the store."""
        for name in names:
            session = self._sessions.pop(name, None)
            for receipt in session.turns if session else [name]:  # one without a name is called as its receipt
                self._held -= len(self._tokens.pop(receipt, ()))

    def leaves(self, session: str, parent: str | None, prompt: Sequence[int]) -> list[int]:
        """Return where a prompt leaves the tokens of the turn that it goes on from, and of the session's last turn.

        Of tokens in memory only: what isn't there was asked for long ago.
        """
        last = next(reversed(self._sessions[session].turns), None) if session in self._sessions else None
        held = [self._tokens[receipt] for receipt in (parent, last) if receipt is not None and receipt in self._tokens]
        ids = array("i", prompt) if held else array("i")
        return [common_prefix(tokens, ids) for tokens in held]

    def add(self, session: str, receipt: str, history: History, tokens: Sequence[int]) -> None:
        """A turn that was stored."""
        known = self._sessions.get(session)
        if known is not None:  # otherwise it is read from the store when it is asked for
            known.turns[receipt] = (history, len(tokens))
        self._hold(receipt, array("i", tokens))

    async def _of(self, session: str) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            found = await self.store.history(session)
            # Turns may have been stored meanwhile, by requests of the same session.
            known = self._sessions.setdefault(session, _Session())
            for receipt, history, tokens in found:
                known.turns.setdefault(receipt, (history, tokens))
        self._sessions.move_to_end(session)
        while len(self._sessions) > self.most:
            self._sessions.popitem(last=False)
        return known

    async def _tokens_of(self, receipt: str) -> list[int] | None:
        held = self._tokens.get(receipt)
        if held is not None:
            self._tokens.move_to_end(receipt)
            return held.tolist()
        tokens = await self.store.tokens(receipt)
        if tokens is None:  # removed since
            return None
        self._hold(receipt, array("i", tokens))
        return tokens

    def _hold(self, receipt: str, tokens: array[int]) -> None:
        if receipt not in self._tokens:
            self._tokens[receipt] = tokens
            self._held += len(tokens)
        while self._held > self.most_tokens and len(self._tokens) > 1:
            self._held -= len(self._tokens.popitem(last=False)[1])


def common_prefix(one: array[int], other: array[int]) -> int:
    """Return the length of two arrays' common prefix, by comparing halves, which costs no loop over items."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of_ids(ids: Sequence[int]) -> str:
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()
