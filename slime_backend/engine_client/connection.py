"""One connection to an HTTP/1.1 server: it carries one request at a time, and httptools parses what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_HEAD = 1 << 16  # bytes of a status line with its headers
MAX_UNREAD = 1 << 18  # bytes of a stream that wait for their reader; with more the server has to wait as well
MAX_QUOTED = 80  # bytes of an answer that isn't HTTP


class Head(NamedTuple):
    """The status of an answer and its headers, whose names are in lower case."""

    status: int
    headers: dict[str, str]


class Connection(asyncio.Protocol):
    """Reads the answer to one request after the other.

    connection.send(b"GET / ...")
    head = await connection.head()
    body = await connection.body()      # or as it comes: while piece := await connection.piece(): ...
    connection.reusable                 # whether `send` may be called again

    The three waits raise OSError or EOFError where the connection ends before the answer, and ValueError where the
    answer isn't HTTP/1.1.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False  # by either side, or by an answer that isn't HTTP
        self.closed_here = False
        self.idle_since = 0.0
        self.waiting_since: float | None = None  # by the loop's clock
        self._loop = loop
        self._transport: asyncio.Transport
        # One for all answers: it refers to this object and this object to it, and such a circle for each call would
        # be left to a garbage collection, which a publication puts off.
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._ready: Callable[[], bool] = self._has_head
        self._paused = False
        self._expect_answer(bodiless=False)
        self.complete = True  # nothing is expected before the first request

    def send(self, request: bytes, *, bodiless: bool = False) -> None:
        """Send a request. `bodiless`: it is a HEAD, whose answer has no body, whatever the headers state."""
        self._expect_answer(bodiless)
        self._transport.write(request)

    def _expect_answer(self, bodiless: bool) -> None:
        self.heard = False  # a byte of this answer has come
        self.complete = False  # all of this answer has come
        self._bodiless = bodiless
        self._head: Head | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = self._header_bytes = 0
        self._until_end = False  # the body ends with the connection
        self._keep_alive = True
        self._pieces: list[bytes] = []
        self._unread = 0  # bytes in `_pieces`
        self._all_wanted = False
        self._error: Exception | None = None

    async def head(self) -> Head:
        await self._until(self._has_head)
        assert self._head is not None
        return self._head

    async def body(self) -> bytes:
        """Return the complete body."""
        self._all_wanted = True
        self._read_on()
        await self._until(self._is_complete)
        return self._take()

    async def piece(self) -> bytes:
        """Return what has come of the body since the last time, or nothing at its end."""
        await self._until(self._has_piece)
        return self._take()

    async def rest(self, seconds: float) -> None:
        """Return after `seconds`, or at once where the answer is complete or the connection has ended."""
        if not self.complete and self._error is None:
            timer = self._loop.call_later(seconds, self._wake)
            try:
                await self._wait(self._is_complete)
            finally:
                timer.cancel()

    @property
    def reusable(self) -> bool:
        """Whether all of the answer has come and the connection goes on."""
        return self.complete and self._keep_alive and not self.ended

    def close(self) -> None:
        """Break the connection; who reads gets what has come and then an error, also where that was all."""
        self.closed_here, self.complete = True, False
        self._error = self._error or ConnectionAbortedError("it was closed on this side")
        self._break(self._error)

    # ---- waiting ------------------------------------------------------------------------------------------------

    async def _until(self, ready: Callable[[], bool]) -> None:
        if not ready() and self._error is None:
            self.waiting_since = self._loop.time()
            try:
                await self._wait(ready)
            finally:
                self.waiting_since = None
        if not ready():
            assert self._error is not None
            raise self._error

    async def _wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` holds, at an error, or at `_wake`."""
        self._ready, self._waiter = ready, self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _has_head(self) -> bool:
        return self._head is not None

    def _is_complete(self) -> bool:
        return self.complete

    def _has_piece(self) -> bool:
        return self._unread > 0 or self.complete

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces, self._unread = [], 0
        self._read_on()
        return body

    def _read_on(self) -> None:
        if self._paused and not self.ended:
            self._paused = False
            self._transport.resume_reading()

    # ---- what the transport calls -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.complete or self.ended:  # nobody asked, so the next answer couldn't be known from this one
            self._keep_alive = False
            self._transport.abort()
            return
        self.heard = True
        if self._head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._refuse(error, data)
        if self._head is None and self._head_bytes > MAX_HEAD:
            self._break(_too_long())
        if self._unread > MAX_UNREAD and not (self._all_wanted or self._paused or self.complete or self.ended):
            self._paused = True
            self._transport.pause_reading()
        if self._ready():
            self._wake()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _refuse(self, error: Exception, data: bytes) -> None:
        if self.complete:  # what comes behind the answer isn't part of it
            self._keep_alive = False
        elif isinstance(error.__context__, ValueError):  # of one of the callbacks below
            self._break(error.__context__)
        else:
            self._break(ValueError(f"not HTTP/1.1: {error}, near {data[:MAX_QUOTED]!r}"))

    def _break(self, error: Exception) -> None:
        self._end(error)
        self._transport.abort()

    def _end(self, error: Exception | None) -> None:
        """Note that nothing more will come. Without an error an answer without a length is complete."""
        if self.ended:
            return
        self.ended = True
        if error is None and self._until_end:
            self.complete = True
        elif not self.complete:
            self._error = error or EOFError("the connection ended before the answer")
        self._wake()

    # ---- what the parser calls ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + len(": \r\n")
        if self._header_bytes > MAX_HEAD:
            raise _too_long()
        if self._head is None:  # else it is a trailer
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        if status < 100 or status == 101:  # nothing here asks for another protocol
            raise ValueError(f"not HTTP/1.1: an answer of status {status}")
        self._headers = {}
        if status < 200:  # a note that the answer is on its way
            return
        self._head = Head(status, headers)
        self._keep_alive = self._parser.should_keep_alive()
        self._until_end = not ("content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower())
        if self._bodiless:
            # The parser has no way to know that no body follows, so this is its last answer.
            self.complete, self._keep_alive = True, False

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._pieces.append(body)
            self._unread += len(body)

    def on_message_complete(self) -> None:
        self.complete = self._head is not None


def _too_long() -> ValueError:
    return ValueError(f"more than {MAX_HEAD} bytes of headers")
