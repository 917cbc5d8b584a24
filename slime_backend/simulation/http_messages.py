"""`MessageReader` reads HTTP/1.1 messages from a stream, for a server or a test; httptools parses them."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

MAX_HEAD = 1 << 16  # bytes of a first line with its headers
READ_BYTES = 1 << 16


class Message(NamedTuple):
    """A message is a request or a response, with the names of its headers in lower case."""

    method: str  # a request's, as the path
    path: str
    status: int  # a response's
    headers: dict[str, str]
    body: bytes


class MessageReader:
    """The reader reads the messages of one connection: requests, or responses with `responses`."""

    def __init__(self, reader: asyncio.StreamReader, *, responses: bool = False) -> None:
        self._reader = reader
        self._parser: HttpRequestParser | HttpResponseParser
        self._parser = HttpResponseParser(self) if responses else HttpRequestParser(self)
        self._responses = responses
        self._found: list[Message] = []
        self.on_message_begin()

    async def next(self) -> Message:
        """Return the next message; a response without a length ends with the connection.

        Raises EOFError where the message is cut off, ValueError where it isn't HTTP.
        """
        while not self._found:
            data = await self._reader.read(READ_BYTES)
            if not data:
                return self._at_end()
            if not self._in_body:
                self._head_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except (HttpParserError, HttpParserUpgrade) as error:
                raise ValueError(f"not HTTP/1.1: {error}") from error
            if not self._in_body and self._head_bytes > MAX_HEAD + READ_BYTES:
                raise ValueError(f"more than {MAX_HEAD} bytes of headers")
        return self._found.pop(0)

    def _at_end(self) -> Message:
        chunked = "chunked" in self._headers.get("transfer-encoding", "")
        if self._responses and self._in_body and not chunked and "content-length" not in self._headers:
            return self._message()
        raise EOFError("the connection ended before the message")

    def _message(self) -> Message:
        method, status = "", 0
        if isinstance(self._parser, HttpResponseParser):
            status = self._parser.get_status_code()
        else:
            method = self._parser.get_method().decode()
        return Message(method, self._path.decode("latin-1"), status, self._headers, b"".join(self._body))

    def on_message_begin(self) -> None:
        self._path = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._in_body = False
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._found.append(self._message())
        self.on_message_begin()


async def read_response(reader: asyncio.StreamReader) -> Message:
    """Read the only response of a connection; raises as MessageReader.next."""
    return await MessageReader(reader, responses=True).next()
