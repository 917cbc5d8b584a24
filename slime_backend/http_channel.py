"""HTTP/1.1 to one server over kept-alive connections, cheap enough for a barrier over hundreds of engines.

Between pause and verified, a publication makes three calls to every engine, and all engines stand still until the last
one is answered; so what a call costs this process is multiplied by the fleet. asyncio's own streams with this little
around them take about a quarter of what aiohttp's client needs (`reef-slime bench fleet` times the whole barrier).

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

from slime_backend.local_errors import LocalResourceError, NoConnection, is_local

MAX_HEAD = 1 << 16  # bytes of a status line with its headers
# uvicorn closes an idle connection after 5 s; a request sent at that moment would be lost.
MAX_IDLE_S = 2.0
END_OF_EVENTS = b"[DONE]"  # SGLang's last event of a stream


class Message(NamedTuple):
    """A request or a response: its first line, its headers in lower case, its body."""

    first_line: str
    headers: dict[str, str]
    body: bytes


class Head(NamedTuple):
    """Of a request or a response."""

    first_line: str
    status: int  # 0 of a request
    headers: dict[str, str]  # names in lower case


class Response(NamedTuple):
    status: int
    body: bytes
    retry_after: str = ""  # the header of that name


class _Reader(asyncio.StreamReader):
    """Can be left alone while more comes."""

    heard = False  # a byte of the answer has come
    ended = False  # the last event of a stream has come
    waiting: asyncio.Future[None] | None = None

    async def rest(self, seconds: float) -> None:
        """Return after `seconds`, or at once when the stream of events has ended, or the connection."""
        if self.ended or self.at_eof():
            return
        loop = asyncio.get_running_loop()
        self.waiting = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self.waiting
        finally:
            timer.cancel()
            self.waiting = None

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        super().feed_data(data)
        self.heard = True
        if END_OF_EVENTS in data:
            self.ended = True
            self._wake()

    def feed_eof(self) -> None:
        super().feed_eof()
        self._wake()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._wake()

    def _wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class _Unanswered(ConnectionError):
    """The server ended the connection before a byte of its answer."""


class _Connection(NamedTuple):
    reader: _Reader
    writer: asyncio.StreamWriter
    idle_since: float

    def close(self) -> None:
        self.writer.transport.abort()


class Stream:
    """An answer that is still coming. `close` ends it from outside: who reads gets ConnectionError."""

    def __init__(self, status: int, connection: _Connection, headers: dict[str, str], deadline_s: float) -> None:
        self.status = status
        self.retry_after = headers.get("retry-after", "")
        self._connection, self._deadline_s = connection, deadline_s
        self._chunks = _Chunks() if "chunked" in headers.get("transfer-encoding", "").lower() else None
        self._left = int(headers["content-length"]) if "content-length" in headers else None  # bytes
        self._last = headers.get("connection", "").lower() == "close"  # answer on this connection
        self._closed = False
        self._late = False
        self._heard_at = 0.0

    @property
    def reusable(self) -> bool:
        """Whether all of it was read, so that the connection can carry another request."""
        whole = self._left == 0 if self._chunks is None else self._chunks.clean
        return whole and not (self._closed or self._last or self._connection.reader.at_eof())

    def close(self) -> None:
        self._closed = True
        self._connection.close()

    async def rest(self, seconds: float) -> None:
        """Let more of it come, for `seconds` or until its end is there: small pieces cost more than a large one."""
        await self._connection.reader.rest(seconds)

    async def lines(self) -> AsyncIterator[list[bytes]]:
        """Lines without their ends, each time all that have come since: a reader that is slow is called less often.

        Raises ConnectionError where the answer is cut off, TimeoutError where a piece of it takes longer than the
        deadline.
        """
        rest = b""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        # One timer for the whole stream: one for each piece of it takes longer than to read the piece.
        self._timer = loop.call_later(self._deadline_s, self._check)
        try:
            async for piece in self._pieces():
                self._heard_at = loop.time()
                *whole, rest = (rest + piece).split(b"\n")
                if whole:
                    yield whole
        except (EOFError, ValueError, OSError) as error:
            if self._late:
                raise TimeoutError(f"nothing within {self._deadline_s:g} s") from error
            raise ConnectionError(f"the stream broke ({type(error).__name__}: {error})") from error
        finally:
            self._timer.cancel()
        if self._closed:
            raise ConnectionError("the stream was closed")
        if rest:
            yield [rest]

    async def _pieces(self) -> AsyncIterator[bytes]:
        while self._left != 0 and not (self._chunks is not None and self._chunks.over):
            piece = await self._connection.reader.read(MAX_HEAD if self._left is None else self._left)
            if not piece:
                if self._left is None and self._chunks is None:
                    return
                raise EOFError("the connection ended before the answer")
            if self._left is not None:
                self._left -= len(piece)
            yield piece if self._chunks is None else self._chunks.feed(piece)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._heard_at + self._deadline_s - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._check)
        else:
            self._late = True
            self._connection.close()


class _Chunks:
    """Takes a chunked body apart as it comes."""

    def __init__(self) -> None:
        self.over = False
        self.clean = False  # over, and nothing behind it but its own end
        self._raw = b""

    def feed(self, piece: bytes) -> bytes:
        """What is whole. Raises ValueError for what is no chunk."""
        raw, at, found = self._raw + piece, 0, []
        while (end_of_size := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end_of_size].split(b";")[0], 16)
            begin = end_of_size + 2
            if len(raw) < begin + size + 2:
                break
            if size == 0:
                self.over, self.clean = True, raw[begin:] == b"\r\n"  # trailers are of no interest
                break
            found.append(raw[begin : begin + size])
            at = begin + size + 2
        self._raw = raw[at:]
        return b"".join(found)


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
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

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
                    content = await _read_body(connection.reader, head, until_eof=True)
            except BaseException:
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
        if connection.reader.at_eof() or head.headers.get("connection", "").lower() == "close":
            connection.close()
        else:
            self._keep(connection)
        return Response(head.status, content, head.headers.get("retry-after", ""))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, deadline_s: float) -> AsyncIterator[Stream]:
        """A repeatable POST whose answer is read by lines while it comes. Raises as `request` does, for the head of the
        answer too. Leaving the block before the answer's end breaks the connection, which tells the server to stop.
        """
        async with asyncio.timeout(deadline_s):
            connection, head = await self._begin("POST", path, body, True)
        stream = Stream(head.status, connection, head.headers, deadline_s)
        try:
            yield stream
        finally:
            self._busy.discard(connection)
            if stream.reusable:
                self._keep(connection)
            else:
                connection.close()

    async def _begin(self, method: str, path: str, body: bytes | None, repeatable: bool) -> tuple[_Connection, Head]:
        """Send a request and read the head of its answer; the connection is busy from then on.

        A kept connection that ends before a byte of the answer was closed as idle, in most cases with the request
        unread: a server that stands still for uvicorn's 5 s closes what is over time before it reads what has come
        (seen with uvloop and with asyncio, uvicorn 0.54). A repeatable request is sent once more, on a new one.
        """
        sent = self._head(method, path, body) + (body or b"")
        kept = self._kept()
        if kept is not None:
            try:
                return kept, await self._exchange(kept, sent)
            except _Unanswered:
                if not repeatable:
                    raise
        try:
            connection = await self._open()
        except NoConnection as error:
            if kept is None or isinstance(error, LocalResourceError):
                raise
            raise ConnectionError(str(error)) from error  # sent on the kept one, after which there was nobody
        return connection, await self._exchange(connection, sent)

    async def _exchange(self, connection: _Connection, sent: bytes) -> Head:
        self._busy.add(connection)
        connection.reader.heard = connection.reader.ended = False
        try:
            with _named():
                connection.writer.write(sent)
                return await read_head(connection.reader)
        except BaseException as error:
            closed_here = connection not in self._busy
            self._busy.discard(connection)
            connection.close()
            if isinstance(error, ConnectionError) and not (closed_here or connection.reader.heard):
                raise _Unanswered(str(error)) from error
            raise

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept: */*\r\n"
        head += self._header(path)
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n"
        return head.encode() + b"\r\n"

    def _keep(self, connection: _Connection) -> None:
        now = time.monotonic()
        # The oldest lie at the front; after a peak of requests nobody would come to them.
        while self._idle and now - self._idle[0].idle_since > MAX_IDLE_S:
            self._idle.pop(0).close()
        self._idle.append(connection._replace(idle_since=now))

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < MAX_IDLE_S and not connection.reader.at_eof():
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        if not self._host or not self._port:
            raise ConnectionError(f"{self.url!r} is not an address like http://127.0.0.1:30000")
        loop = asyncio.get_running_loop()
        reader = _Reader(limit=MAX_HEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, self._host, self._port, ssl=self._secure or None
            )
        except OSError as error:
            told = f"no connection ({error.strerror or error})"
            raise (LocalResourceError(told) if is_local(error) else NoConnection(told)) from error
        return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop), time.monotonic())

    def close(self) -> None:
        """Close every connection; what is under way fails with ConnectionError."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        self._busy.clear()


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Raises EOFError, ValueError as `read_message`."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise ValueError(f"more than {MAX_HEAD} bytes of headers") from error
    first_line, *lines = head[:-4].split("\r\n")
    if "HTTP/1." not in first_line or first_line.count(" ") < 1:
        raise ValueError(f"not HTTP/1.1: {first_line[:80]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Head(first_line, int(first_line.split(" ")[1]) if first_line.startswith("HTTP/") else 0, headers)


async def read_message(reader: asyncio.StreamReader, *, until_eof: bool) -> Message:
    """Read one message. `until_eof`: without any length the body ends with the connection (so a response may).

    Raises EOFError where the message is cut off, ValueError where it isn't HTTP.
    """
    head = await read_head(reader)
    return Message(head.first_line, head.headers, await _read_body(reader, head, until_eof=until_eof))


async def _read_body(reader: asyncio.StreamReader, head: Head, *, until_eof: bool) -> bytes:
    if "content-length" in head.headers:
        return await reader.readexactly(int(head.headers["content-length"]))
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        return await _read_chunks(reader)
    return await reader.read() if until_eof and head.status not in (204, 304) else b""


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, OSError) as error:
        raise ConnectionError(f"the connection broke ({type(error).__name__}: {error})") from error


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        pass
    return b"".join(chunks)
