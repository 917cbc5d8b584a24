"""One pass over a source for all engines that load at the same time.

A source may have to gather each bucket from several processes, so it is read once, and every engine gets a bucket
before the next one is gathered. That costs nothing: the publication waits for the slowest engine anyway. An engine that
fails leaves, and the others go on.

The first item is made once every named reader has entered, or left again; who hasn't come within `late_s` is not waited
for, and finds that the pass has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from slime_backend.errors import ReefError
from slime_backend.transports.arrivals import LATE_S, Arrivals

T = TypeVar("T")


class PassBegun(ReefError, RuntimeError):
    """A reader came after the first item was made: it would get the rest alone, and take that for everything."""


class OnePass(Generic[T]):
    """Hands each item to every reader. For one event loop; the items are made on a thread.

    one_pass = OnePass(items, readers=["a", "b"])
    async with one_pass.reader("a") as items:
        async for item in items: ...
    """

    def __init__(self, items: Iterator[T], readers: Iterable[str] = (), late_s: float = LATE_S) -> None:
        """`readers`: who will read. Without names, whoever enters in one turn of the event loop."""
        self._items = items
        self._arrivals = Arrivals(readers, self._make_if_all_wait, late_s)
        self._readers = 0
        self._waiting: list[asyncio.Future[T | None]] = []
        self._making: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._making is not None

    @asynccontextmanager
    async def reader(self, name: str = "") -> AsyncIterator[AsyncIterator[T]]:
        """Raises PassBegun."""
        if self.begun:
            raise PassBegun(f"{name or 'a reader'} came after the pass over the weights had begun")
        self._readers += 1
        self._arrivals.arrive(name)
        try:
            await asyncio.sleep(0)  # readers without a name that enter in the same turn are counted, too
            yield self._read()
        finally:
            self._readers -= 1
            self._make_if_all_wait()

    async def _read(self) -> AsyncIterator[T]:
        while (item := await self._next()) is not None:
            yield item
            del item  # before the next one is made

    async def _next(self) -> T | None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._make_if_all_wait()
        try:
            return await future
        finally:
            if future in self._waiting:  # cancelled
                self._waiting.remove(future)

    def _make_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._readers and not self._arrivals.missing:
            waiting, self._waiting = self._waiting, []
            self._making = asyncio.create_task(self._make(waiting))

    async def _make(self, waiting: list[asyncio.Future[T | None]]) -> None:
        try:
            item = await asyncio.to_thread(next, self._items, None)
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for future in waiting:
            if not future.done():  # its reader was cancelled meanwhile
                future.set_result(item)
