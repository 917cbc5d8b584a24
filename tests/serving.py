"""Bare servers for tests, each ended with its block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving_raw(serve: Serve) -> AsyncIterator[str]:
    """Yield the URL of a server on the loopback interface that serves each connection by `serve`.

    Each connection is closed when `serve` returns, and all are broken at the block's end. asyncio's own
    `async with server` waits for every open connection since Python 3.12, so one that nobody closes hangs it.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(asyncio.CancelledError, ConnectionError):  # asyncio's streams log both (Python 3.11)
                await serve(reader, writer)
            writer.close()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
