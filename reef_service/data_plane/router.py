"""Which engine a request goes to: to one with least to do, and of these to the one that has most of it in its cache.

    session    the engine of the session's last turn, unless it is crowded: SLACK requests more than the least busy
               engine, and half as many again
    load       otherwise the engines whose requests in flight are even with the least busy one's; for the first turn of
               a session, of these the ones whose sessions are, because its next turns will follow it
    prefix     of these, the one with the longest run of the prompt's blocks, then the one that was chosen the longest
               ago

Even is: at most a quarter more. So an engine without requests gets the next one, whatever the others have in their
caches: to compute a prefix there costs nobody anything, to wait behind others does. Where all are busy and a prefill
delays somebody's tokens, a quarter leaves a choice.

What an engine has in its cache isn't asked but remembered: the blocks of the prompts that were sent there, forgotten
with the sessions when the fleet moves to another version, because nothing cached is reused across a publication.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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
        self._held: Counter[str] = Counter()  # engine -> sessions that are there
        self._turn: Counter[str] = Counter()  # engine -> number of the choice that it was chosen at last
        self._choices = 0

    def choose_for(self, prompt: Sequence[int], session: str) -> Callable[[list[Member]], Member]:
        """To be given to `Fleet.routed`: picks one of the confirmed members and remembers that it did."""
        shares = self.fleet.policy.radix_cache
        blocks = block_hashes(prompt) if shares else []
        session = session if shares else ""  # nothing of it is where its last turn was

        def choose(candidates: list[Member]) -> Member:
            self._forget_older()
            chosen = self._of_session(candidates, session)
            if chosen is None:
                even = _even(candidates, lambda m: m.in_flight)
                if session:
                    even = _even(even, lambda m: self._held[m.name])
                chosen = max(even, key=lambda m: (self._shared(m.name, blocks), -m.in_flight, -self._turn[m.name]))
            self._remember(chosen.name, blocks, session)
            return chosen

        return choose

    def _of_session(self, candidates: list[Member], session: str) -> Member | None:
        """The engine of the session's last turn, if it may be chosen and isn't crowded."""
        name = self._sessions.get(session)
        known = next((m for m in candidates if m.name == name), None)
        least = min(m.in_flight for m in candidates)
        return known if known is not None and known.in_flight <= max(least + SLACK, least * 3 // 2) else None

    def _shared(self, name: str, blocks: Sequence[int]) -> int:
        seen = self._seen.get(name)
        if not seen:
            return 0
        return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, name: str, blocks: Sequence[int], session: str) -> None:
        self._choices += 1
        self._turn[name] = self._choices
        seen = self._seen.setdefault(name, OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > MOST_BLOCKS:
            seen.popitem(last=False)
        if session:
            self._held.subtract([self._sessions.pop(session)] if session in self._sessions else [])
            self._sessions[session] = name
            self._held[name] += 1
            if len(self._sessions) > SESSIONS:
                self._held[self._sessions.popitem(last=False)[1]] -= 1

    def _forget_older(self) -> None:
        if self._version != self.fleet.version:
            self._version = self.fleet.version
            for remembered in (self._seen, self._sessions, self._held):
                remembered.clear()


def _even(members: list[Member], load: Callable[[Member], int]) -> list[Member]:
    """Those whose load is at most a quarter above the least."""
    least = min(load(m) for m in members)
    return [m for m in members if load(m) <= least + least // 4]


def block_hashes(prompt: Sequence[int]) -> list[int]:
    """Return one number for each complete block; it stands for everything up to the block's end."""
    found, so_far = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        so_far = hash((so_far, tuple(prompt[start : start + BLOCK])))
        found.append(so_far)
    return found
