"""Which engine a request goes to: where its session was, else where the longest part of its prompt was seen, else
where there is least to do.

    too busy      an engine with SLACK requests more than the least busy one, and half as many again, is left out:
                  a cache hit saves one prefill, a crowded engine slows every token
    session       the engine of the session's last turn
    prefix        the engine with the longest run of the prompt's blocks, if that is at least one block
    load          fewest requests in flight

What an engine has in its cache isn't asked but remembered: the blocks of the prompts that were sent there, forgotten
when the fleet moves to another version, because nothing cached is reused across a publication.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from slime_backend.fleet import Fleet, Member

BLOCK = 64  # tokens
MOST_BLOCKS = 32_768  # remembered per engine: 2 million tokens
SLACK = 8  # requests
SESSIONS = 65_536


class Router:
    """One per fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._version = fleet.version
        self._seen: dict[str, OrderedDict[int, None]] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose_for(self, prompt: Sequence[int], session: str) -> Callable[[list[Member]], Member]:
        """To be given to `Fleet.routed`: picks one of the confirmed members and remembers that it did."""
        shares = self.fleet.policy.radix_cache
        blocks = block_hashes(prompt) if shares else []

        def choose(candidates: list[Member]) -> Member:
            self._forget_older()
            least = min(m.in_flight for m in candidates)
            free = [m for m in candidates if m.in_flight <= max(least + SLACK, least * 3 // 2)]
            known = self._sessions.get(session) if session else None
            chosen = next((m for m in free if m.name == known), None)
            if chosen is None:
                chosen = max(free, key=lambda m: (self._shared(m.name, blocks), -m.in_flight))
            self._remember(chosen.name, blocks, session)
            return chosen

        return choose

    def _shared(self, name: str, blocks: Sequence[int]) -> int:
        seen = self._seen.get(name)
        if not seen:
            return 0
        return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, name: str, blocks: Sequence[int], session: str) -> None:
        seen = self._seen.setdefault(name, OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > MOST_BLOCKS:
            seen.popitem(last=False)
        if session:
            self._sessions[session] = name
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)

    def _forget_older(self) -> None:
        if self._version != self.fleet.version:
            self._version = self.fleet.version
            self._seen.clear()


def block_hashes(prompt: Sequence[int]) -> list[int]:
    """Return one number for each complete block; it stands for everything up to the block's end."""
    found, so_far = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        so_far = hash((so_far, tuple(prompt[start : start + BLOCK])))
        found.append(so_far)
    return found
