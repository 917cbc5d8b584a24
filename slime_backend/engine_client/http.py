"""HTTP/1.1 to one server over kept-alive connections, cheap enough for a barrier over hundreds of engines.

Between pause and verified, a publication makes three calls to every engine, and all engines stay paused until the last
one is answered; so what a call costs this process is multiplied by the fleet. `reef-slime bench fleet --part clients`
measures what the same calls cost by this channel and by aiohttp's client.

It speaks what an SGLang server (uvicorn) speaks: bodies with a Content-Length, chunked, or until the end of the
connection. No redirects, no proxy, no compression.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from slime_backend.engine_client.connection import Connection, Head
from slime_backend.engine_client.local_errors import LocalResourceError, NoConnection, is_local

# uvicorn closes an idle connection after 5 s; a request sent at that moment would be lost.
MAX_IDLE_S = 2.0


class Response(NamedTuple):
    status: int
    body: bytes
    retry_after: str = ""  # the header of that name


class _Unanswered(ConnectionError):
    """The server ended the connection before a byte of its answer."""


class Stream:
    """An answer that is still coming. `close` ends it from outside: who reads gets ConnectionError."""

    def __init__(self, head: Head, connection: Connection, deadline_s: float) -> None:
        self.status = head.status
        self.retry_after = head.headers.get("retry-after", "")
        self._connection, self._deadline_s = connection, deadline_s
        self._late = False
        # One timer for the whole stream: one for each piece of it takes longer than to read the piece.
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._check)

    def close(self) -> None:
        self._connection.close()

    async def rest(self, seconds: float) -> None:
        """Let more of it come, for `seconds` or until its end is there: small pieces cost more than a large one."""
        await self._connection.rest(seconds)

    async def lines(self) -> AsyncIterator[list[bytes]]:
        """Lines without their ends, each time all that have come since: a reader that is slow is called less often.

        Raises ConnectionError where the answer is cut off, TimeoutError where a piece of it takes longer than the
        deadline.
        """
        rest = b""
        while piece := await self._piece():
            *lines, rest = (rest + piece).split(b"\n")
            if lines:
                yield lines
        if rest:
            yield [rest]

    async def _piece(self) -> bytes:
        try:
            return await self._connection.piece()
        except (EOFError, ValueError, OSError) as error:
            if self._late:
                raise TimeoutError(f"nothing within {self._deadline_s:g} s") from error
            raise ConnectionError(f"the stream broke ({type(error).__name__}: {error})") from error

    def _check(self) -> None:
        """Break the connection where the reader has waited for too long for one piece."""
        loop = asyncio.get_running_loop()
        since = self._connection.waiting_since
        left = self._deadline_s - (0.0 if since is None else loop.time() - since)
        if left > 0:
            self._timer = loop.call_later(left, self._check)
        else:
            self._late = True
            self._connection.close()

    def _leave(self) -> None:
        self._timer.cancel()


class HttpChannel:
    """Any number of requests at once to the server at `url`; each has a connection to itself while it lasts."""

    def __init__(self, url: str, header: Callable[[str], str] = lambda path: "") -> None:
        """`header`: a further header line for a path, with its end."""
        self.url = url
        self._header = header
        parts = urlsplit(url)
        self._host, self._netloc, self._prefix = parts.hostname or "", parts.netloc, parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        try:
            self._port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        except ValueError:  # not a number; `request` says it
            self._port = 0
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def request(
        self, method: str, path: str, body: bytes | None, deadline_s: float, *, repeatable: bool = False
    ) -> Response:
        """One exchange. Raises TimeoutError at the deadline, ConnectionError where the connection fails or breaks.

        `repeatable`: does no harm if the server gets it twice, so it may be sent once more (`_begin`).
        A request that is given up takes its connection with it, which tells the server to stop working on it.
        """
        async with asyncio.timeout(deadline_s):
            connection, head = await self._begin(method, path, body, repeatable)
            try:
                with _named():
                    content = await connection.body()
            finally:
                self._release(connection)
        return Response(head.status, content, head.headers.get("retry-after", ""))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, deadline_s: float) -> AsyncIterator[Stream]:
        """A repeatable POST whose answer is read by lines while it comes. Raises as `request` does, for the head of the
        answer too. Leaving the block before the answer's end breaks the connection, which tells the server to stop.
        """
        async with asyncio.timeout(deadline_s):
            connection, head = await self._begin("POST", path, body, True)
        stream = Stream(head, connection, deadline_s)
        try:
            yield stream
        finally:
            stream._leave()
            self._release(connection)

    async def _begin(self, method: str, path: str, body: bytes | None, repeatable: bool) -> tuple[Connection, Head]:
        """Send a request and read the head of its answer; the connection is busy from then on.

        A kept connection that ends before a byte of the answer was closed as idle, in most cases with the request
        unread: a server that is blocked for uvicorn's 5 s closes what is over time before it reads what has come
        (seen with uvloop and with asyncio, uvicorn 0.54). A repeatable request is sent once more, on a new one.
        """
        sent = self._head(method, path, body) + (body or b"")
        kept = self._kept()
        if kept is not None:
            try:
                return kept, await self._exchange(kept, sent, method)
            except _Unanswered:
                if not repeatable:
                    raise
        try:
            connection = await self._open()
        except NoConnection as error:
            if kept is None or isinstance(error, LocalResourceError):
                raise
            raise ConnectionError(str(error)) from error  # sent on the kept one, after which there was nobody
        return connection, await self._exchange(connection, sent, method)

    async def _exchange(self, connection: Connection, sent: bytes, method: str) -> Head:
        self._busy.add(connection)
        try:
            with _named():
                connection.send(sent, bodiless=method == "HEAD")
                return await connection.head()
        except BaseException as error:
            unanswered = not (connection.closed_here or connection.heard)
            self._release(connection)
            if isinstance(error, ConnectionError) and unanswered:
                raise _Unanswered(str(error)) from error
            raise

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept: */*\r\n"
        head += self._header(path)
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n"
        return head.encode() + b"\r\n"

    def _release(self, connection: Connection) -> None:
        """Keep a connection whose exchange is over for the next one, or close it."""
        self._busy.discard(connection)
        if not connection.reusable:
            connection.close()
            return
        now = connection.idle_since = time.monotonic()
        # The oldest lie at the front; after a peak of requests nobody would come to them.
        while self._idle and now - self._idle[0].idle_since > MAX_IDLE_S:
            self._idle.pop(0).close()
        self._idle.append(connection)

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < MAX_IDLE_S and connection.reusable:
                return connection
            connection.close()
        return None

    async def _open(self) -> Connection:
        if not self._host or not self._port:
            raise ConnectionError(f"{self.url!r} is not an address like http://127.0.0.1:30000")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(loop), self._host, self._port, ssl=self._secure or None
            )
        except OSError as error:
            seen = f"no connection ({error.strerror or error})"
            raise (LocalResourceError(seen) if is_local(error) else NoConnection(seen)) from error
        return connection

    def close(self) -> None:
        """Close every connection; what is under way fails with ConnectionError."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        self._busy.clear()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, OSError) as error:
        raise ConnectionError(f"the connection broke ({type(error).__name__}: {error})") from error
