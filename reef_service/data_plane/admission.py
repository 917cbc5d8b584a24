"""The gate in front of the engines: requests wait here in the order in which they came.

    open     at most `limit` requests at once; the next waits for one of them to end
    closed   a publication has paused the engines: everybody waits

A request that has waited for `hold_s` is refused with a time to retry after, and so is one that finds
`queue` others waiting.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reef_service.errors import ApiError


class Gate:
    """Used inside one event loop. async with gate.passed(): ... one request ..."""

    def __init__(self, *, limit: int, queue: int, hold_s: float) -> None:
        self.limit, self.queue, self.hold_s = limit, queue, hold_s
        self.inside = 0
        self.refused = 0
        self._closed = 0  # publications that hold it closed
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed > 0

    def close(self) -> None:
        self._closed += 1

    def open(self) -> None:
        self._closed -= 1
        self._admit()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Raises ApiError 503 with Retry-After."""
        await self._enter()
        try:
            yield
        finally:
            self.inside -= 1
            self._admit()

    async def _enter(self) -> None:
        if not self.closed and not self._waiting and self.inside < self.limit:
            self.inside += 1
            return
        if len(self._waiting) >= self.queue:
            raise self._busy(f"{self.queue} requests are waiting already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            async with asyncio.timeout(self.hold_s):
                await turn
        except TimeoutError:
            if _was_admitted(turn):
                return
            why = "a publication is under way" if self.closed else f"{self.limit} requests are being answered"
            raise self._busy(f"waited {self.hold_s:g} s: {why}") from None
        except BaseException:
            if _was_admitted(turn):  # and cancelled at the same moment
                self.inside -= 1
                self._admit()
            raise
        finally:
            self._waiting.pop(turn, None)

    def _admit(self) -> None:
        while self._waiting and not self.closed and self.inside < self.limit:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                self.inside += 1

    def _busy(self, why: str) -> ApiError:
        self.refused += 1
        return ApiError(503, f"the gateway is busy: {why}; try again", code="overloaded", retry_after=1)


def _was_admitted(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled()
