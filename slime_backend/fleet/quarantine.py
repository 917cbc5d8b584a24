"""Requests during which an engine ended. None of them is sent to another engine: it might end that one as well.

    in flight when it ended                             given up, counted, logged
    sent again, and it was alone on an engine's end     refused
    sent again, and it was there at two ends            refused
    sent again, one of many at a single end             taken: engines end for other reasons too, and the others of
                                                        the many did nothing

Who sends it again is known by what it asks for (`key_of`), for KEEP_S.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)
KEEP_S = 600.0
MOST = 1024  # requests that are remembered
SHOWN = 8  # of them in `latest`


@dataclass(slots=True, eq=False)
class End:
    """The end of one engine's process, and how many requests were in flight on it."""

    requests: int = 0


@dataclass(slots=True)
class _Held:
    engine: str
    why: str
    at: float  # seconds since the epoch
    ends: list[End] = field(default_factory=list)


@dataclass(slots=True)
class Quarantine:
    """One for a fleet. `count`: requests that were given up, `refused`: those that came again and were not taken."""

    keep_s: float = KEEP_S
    count: int = 0
    refused: int = 0
    _held: OrderedDict[str, _Held] = field(default_factory=OrderedDict)

    def add(self, key: str, engine: str, why: str, end: End) -> None:
        """A request was in flight on `engine` when that ended, as far as can be seen."""
        end.requests += 1
        held = self._held.pop(key, None) or _Held(engine, why, time.time())
        held.engine, held.why, held.at = engine, why, time.time()
        if not any(known is end for known in held.ends):
            held.ends.append(end)
        self._held[key] = held
        while len(self._held) > MOST:
            self._held.popitem(last=False)

    def acquit(self, key: str, end: End) -> None:
        """The engine is back as the process that it was: it hadn't ended, only its network had."""
        end.requests -= 1
        held = self._held.get(key)
        if held is not None:
            held.ends = [known for known in held.ends if known is not end]
            if not held.ends:
                del self._held[key]

    def give_up(self, key: str, engine: str, why: str) -> None:
        """It is sent to no other engine."""
        self.count += 1
        log.error("request %s is quarantined: %s ended while it answered it (%s)", key[:16], engine, why)

    def why_refused(self, key: str) -> str:
        """Why a request that comes again isn't taken; "" if it may be."""
        self._forget()
        held = self._held.get(key)
        if held is None or (len(held.ends) < 2 and held.ends[0].requests > 1):
            return ""
        self.refused += 1
        times = "an engine" if len(held.ends) == 1 else f"{len(held.ends)} engines"
        return f"{times} ended during this request, the last {held.engine} ({held.why})"

    def __bool__(self) -> bool:
        """Whether any request is remembered."""
        return bool(self._held)

    def latest(self) -> list[dict[str, Any]]:
        """The last requests that were given up, as JSON, newest first."""
        self._forget()
        newest = list(reversed(self._held.items()))[:SHOWN]
        return [{"request": key[:16], "engine": h.engine, "reason": h.why, "at": h.at} for key, h in newest]

    def _forget(self) -> None:
        now = time.time()
        while self._held and now - next(iter(self._held.values())).at > self.keep_s:
            self._held.popitem(last=False)


def key_of(prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> str:
    """The same for two requests that ask for the same."""
    digest = hashlib.sha256(array("q", prompt_ids).tobytes())
    digest.update(json.dumps(sampling, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
