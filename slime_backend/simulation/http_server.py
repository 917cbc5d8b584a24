"""`HttpServer` is a loopback HTTP server for fake engines, as light as the client that is timed against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from slime_backend.simulation.http_messages import MAX_HEAD, Message, MessageReader


class Reply(NamedTuple):
    """A reply is an answer; `None` in its place breaks the connection."""

    body: Any = ""  # text, or what becomes JSON
    status: int = 200
    events: AsyncGenerator[str, None] | None = None  # instead of a body: sent piece by piece, until it ends or raises


# (path, body) -> the answer
Handler = Callable[[str, dict[str, Any]], Awaitable[Reply | None]]
Guard = Callable[[Message], Reply | None]


class HttpServer:
    """The server runs `handler` on 127.0.0.1 and keeps connections alive."""

    def __init__(self, handler: Handler, guard: Guard | None = None) -> None:
        """Make the server. A reply of `guard` is sent instead of the handler's."""
        self._handler, self._guard = handler, guard
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_HEAD)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and break every connection, as the end of a process does."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        messages = MessageReader(reader)
        try:
            while self._server is not None:  # also for a connection that was accepted while it stopped
                message = await messages.next()
                reply = self._guard(message) if self._guard is not None else None
                reply = reply or await self._handler(message.path, json.loads(message.body or b"{}"))
                if reply is None:
                    break
                if reply.events is not None:
                    await _send_events(writer, reply)
                    continue
                text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
                content = text.encode()
                writer.write(b"HTTP/1.1 %d \r\nContent-Length: %d\r\n\r\n" % (reply.status, len(content)) + content)
        except (EOFError, OSError):  # the client has gone
            pass
        except asyncio.CancelledError:  # by `stop`; asyncio's streams would log it as an error (Python 3.11)
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()


async def _send_events(writer: asyncio.StreamWriter, reply: Reply) -> None:
    assert reply.events is not None
    writer.write(
        b"HTTP/1.1 %d \r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" % reply.status
    )
    async with aclosing(reply.events) as events:  # so that a client that disconnects ends their generator
        async for piece in events:
            content = piece.encode()
            writer.write(b"%x\r\n" % len(content) + content + b"\r\n")
            await writer.drain()
    writer.write(b"0\r\n\r\n")
