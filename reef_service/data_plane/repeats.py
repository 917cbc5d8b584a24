"""Requests that come again get the answer that there is instead of a second one, which nobody would go on from.

    Idempotency-Key                  the same key in the same session is the same request, for good
    x-stainless-retry-count: 1 ...   an SDK sends a request again by itself: the last one of the session with the same
                                     body, unless that failed or the conversation went on from its answer

One that is still being answered is waited for, and goes on although its first client has gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from reef_service.data_plane.answers import Attempt, Delta, Done
from reef_service.data_plane.stored_answers import done_of
from reef_service.errors import ApiError
from reef_service.store import Store
from reef_service.store.repeats import KeyUsed, StoredAnswer

KEPT = 10_000  # requests whose last attempt failed
LOCKS = 64


class Running(Protocol):
    """A request that is being answered. An Exchange."""

    task: asyncio.Task[None]

    @property
    def answered(self) -> bool: ...

    async def join(self) -> Done | None: ...


E = TypeVar("E", bound=Running)


@dataclass(frozen=True, slots=True)
class Replay:
    """An answer that there is already, in the form of an exchange."""

    end: Done
    abandoned: bool = False

    @property
    def receipt(self) -> str:
        return self.end.record.receipt

    async def events(self) -> AsyncIterator[Delta | Done]:
        record = self.end.record
        yield Delta(list(self.end.answer.pieces), list(record.output_ids), list(record.logprobs))
        yield self.end

    async def done(self) -> Done:
        return self.end

    def leave(self) -> None:
        """Nothing is under way."""


class Repeats:
    """Used inside one event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._under_way: dict[tuple[str, str], tuple[Running, str]] = {}  # with the request's digest
        self._failed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._locks = [asyncio.Lock() for _ in range(LOCKS)]

    def begin(self, attempt: Attempt, make: Callable[[], E]) -> E:
        """A request that doesn't ask for an earlier answer."""
        exchange = make()
        for name in attempt.names:
            self._under_way[name] = exchange, attempt.request
        exchange.task.add_done_callback(lambda task: self._ended(attempt, exchange))
        return exchange

    async def find_or_begin(self, attempt: Attempt, make: Callable[[], E]) -> E | Replay:
        """The answer that there is, or a request for one. Raises ApiError."""
        name = attempt.names[0]
        while True:
            async with self._locks[hash(name) % LOCKS]:  # of two that come together the second finds the first
                running, request = self._under_way.get(name, (None, ""))
                if running is None:
                    stored = None if attempt.retry and name in self._failed else await self._stored(attempt)
                    if stored is None:
                        return self.begin(attempt, make)
                    return Replay(done_of(stored))
            if request != attempt.request:
                raise _reused(KeyUsed.words(attempt.key))
            end = await running.join()
            if end is not None:
                return Replay(end)

    async def _stored(self, attempt: Attempt) -> StoredAnswer | None:
        try:
            return await self.store.answer(attempt.session, attempt.request, attempt.key)
        except KeyUsed as error:
            raise _reused(str(error)) from error

    def _ended(self, attempt: Attempt, exchange: Running) -> None:
        for name in attempt.names:
            if self._under_way.get(name, (None,))[0] is exchange:
                del self._under_way[name]
            self._failed.pop(name, None)
        if not exchange.answered:
            for name in attempt.names:
                self._failed[name] = None
            while len(self._failed) > KEPT:
                self._failed.popitem(last=False)


def _reused(why: str) -> ApiError:
    return ApiError(422, why, code="idempotency_key_reused", should_retry=False)
