"""One pass over a source for all engines that load at the same time.

A source may have to gather each bucket from several processes, so it is read once, and every engine gets a bucket
before the next one is gathered. That costs nothing: the publication waits for the slowest engine anyway. An engine that
fails leaves, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class OnePass(Generic[T]):
    """Hands each item to every reader. For one event loop; the items are made on a thread.

    async with one_pass.reader() as items:      # all readers of a pass enter before the first item is made
        async for item in items: ...
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._readers = 0
        self._waiting: list[asyncio.Future[T | None]] = []
        self._making: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._making is not None

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[AsyncIterator[T]]:
        self._readers += 1
        try:
            await asyncio.sleep(0)  # the loads of all engines begin in one turn of the loop: now each has been counted
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
        if self._waiting and len(self._waiting) == self._readers:
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
