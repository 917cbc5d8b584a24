"""The HTTP that engines are called over, against a server that answers byte by byte what the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slime_backend.engine_client.http import MAX_IDLE_S, HttpChannel, Response
from tests.waiting import until


class RawServer:
    """Answers each request with the next of `answers`, then closes the connection if `close`."""

    def __init__(self, *answers: bytes, close: bool = False) -> None:
        self.answers, self.close = list(answers), close
        self.requests: list[bytes] = []
        self.connections = self.gone = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self.server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        while True:
            head = await reader.read(1 << 16)
            if not head:
                self.gone += 1
                break
            self.requests.append(head)
            for byte in self.answers.pop(0) if self.answers else b"":
                writer.write(bytes([byte]))
                await writer.drain()
            if self.close:
                break
        writer.close()


def ask(run_async, server, times=1, path="/x", **options):
    async def scenario():
        async with server:
            channel = HttpChannel(server.url)
            answers = [await channel.request("POST", path, b'{"a":1}', 5.0, **options) for _ in range(times)]
            channel.close()
            return answers

    return run_async(scenario())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Response(200, b"ok")),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", Response(400, b"")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Response(204, b"")),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n\r\n",
            Response(200, b"abc"),
        ),
    ],
)
def test_bodies_of_every_kind_over_one_kept_connection(run_async, raw, expected):
    server = RawServer(raw, raw)
    assert ask(run_async, server, times=2) == [expected, expected]
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert server.requests[0].endswith(b'Content-Length: 7\r\n\r\n{"a":1}')


def test_a_body_without_a_length_ends_with_the_connection(run_async):
    server = RawServer(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)
    assert ask(run_async, server) == [Response(200, b"all of it")]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 two hundred\r\nContent-Length: 0\r\n\r\n",
        b"220 mail.example.org ESMTP\r\n\r\n",
    ],
)
def test_a_broken_answer_is_a_connection_error(run_async, raw):
    with pytest.raises(ConnectionError, match="broke"):
        ask(run_async, RawServer(raw, close=True))


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://", "http://x:port", ""])
def test_what_is_no_address_is_named(run_async, url):
    with pytest.raises(ConnectionError, match="is not an address like"):
        run_async(HttpChannel(url).request("GET", "/health", None, 1.0))


def test_nobody_listens(run_async):
    with pytest.raises(ConnectionError, match="no connection"):
        run_async(HttpChannel("http://127.0.0.1:1").request("GET", "/health", None, 1.0))


def test_a_request_that_is_given_up_takes_its_connection_along(run_async):
    async def scenario():
        async with RawServer() as server:
            channel = HttpChannel(server.url)
            with pytest.raises(TimeoutError):
                await channel.request("GET", "/slow", None, 0.05)
            await until(lambda: server.gone, "the connection has ended")

    run_async(scenario())


def test_a_connection_that_the_server_closed_is_not_used_again(run_async):
    server = RawServer(*[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] * 2, close=True)

    async def scenario():
        async with server:
            channel = HttpChannel(server.url)
            await channel.request("GET", "/", None, 5.0)
            await until(lambda: channel._idle[0].ended, "the end of the connection has come")
            await channel.request("GET", "/", None, 5.0)
            channel.close()

    run_async(scenario())
    assert server.connections == 2


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_connections_that_nobody_needs_any_more_are_closed(run_async, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("slime_backend.engine_client.http.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scenario():
        async with RawServer(*[OK] * 20) as server:
            channel = HttpChannel(server.url)
            await asyncio.gather(*(channel.request("GET", "/", None, 5.0) for _ in range(5)))
            for _ in range(4):  # one connection is enough for these
                now[0] += 0.6 * MAX_IDLE_S
                await channel.request("GET", "/", None, 5.0)
            await until(lambda: server.gone == 4, "the other four have ended")
            connections, kept = server.connections, len(channel._idle)
            channel.close()
            return connections, kept

    assert run_async(scenario()) == (5, 1)


class Impatient(RawServer):
    """Ends each connection with its second request unanswered, as a server does that closes an idle one too late; what
    it has said by then is `said`."""

    def __init__(self, said: bytes = b"") -> None:
        super().__init__()
        self.said = said

    async def _serve(self, reader, writer):
        self.connections += 1
        for answer in (OK, self.said):
            self.requests.append(await reader.read(1 << 16))
            writer.write(answer)
        writer.close()


def test_what_a_kept_connection_lost_unread_is_sent_once_more(run_async):
    server = Impatient()
    assert ask(run_async, server, times=3, repeatable=True) == [Response(200, b"ok")] * 3
    assert (server.connections, sum(map(bool, server.requests))) == (3, 5)


def test_a_stream_that_a_kept_connection_lost_is_asked_for_once_more(run_async):
    async def scenario():
        async with Impatient() as server:
            channel = HttpChannel(server.url)
            await channel.request("GET", "/", None, 5.0)
            async with channel.stream("/x", b"{}", 5.0) as stream:
                assert [line async for lines in stream.lines() for line in lines] == [b"ok"]
            channel.close()
            return server.connections

    assert run_async(scenario()) == 2


def test_what_may_do_harm_twice_is_sent_once(run_async):
    """A load, for one: a collective that the engine has begun can't be joined again."""
    server = Impatient()
    with pytest.raises(ConnectionError, match="broke"):
        ask(run_async, server, times=2)
    assert server.connections == 1


def test_half_an_answer_is_not_asked_for_again(run_async):
    server = Impatient(b"HTTP/1.1 200")
    with pytest.raises(ConnectionError, match="broke"):
        ask(run_async, server, times=2, repeatable=True)
    assert server.connections == 1


def test_what_a_new_connection_loses_is_an_error(run_async):
    server = RawServer(b"", close=True)
    with pytest.raises(ConnectionError, match="broke"):
        ask(run_async, server, repeatable=True)
    assert server.connections == 1


def test_closing_a_kept_connection_sends_nothing_again(run_async):
    async def scenario():
        async with RawServer(OK) as server:
            channel = HttpChannel(server.url)
            await channel.request("GET", "/", None, 5.0)
            waiting = asyncio.create_task(channel.request("GET", "/slow", None, 30.0, repeatable=True))
            await until(lambda: len(server.requests) == 2, "the second request has come")
            channel.close()
            with pytest.raises(ConnectionError):
                await waiting
            return server.connections

    assert run_async(scenario()) == 1


def test_closing_breaks_what_is_under_way(run_async):
    async def scenario():
        async with RawServer() as server:
            channel = HttpChannel(server.url)
            waiting = asyncio.create_task(channel.request("GET", "/slow", None, 30.0))
            await until(lambda: server.requests, "the request has come")
            channel.close()
            with pytest.raises(ConnectionError, match="broke"):
                await waiting

    run_async(scenario())


def read_stream(run_async, server, close_after=None):
    """The lines of one streamed answer; `close_after`: close it from outside after so many."""

    async def scenario():
        async with server:
            channel = HttpChannel(server.url)
            lines = []
            try:
                async with channel.stream("/x", b"{}", 5.0) as stream:
                    async for found in stream.lines():
                        lines += found
                        if close_after is not None and len(lines) >= close_after:
                            stream.close()
                return stream.status, lines
            finally:
                channel.close()

    return run_async(scenario())


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (CHUNKED + b"5\r\na\nb\nc\r\n3\r\nd\n\n\r\n0\r\n\r\n", (200, [b"a", b"b", b"cd", b""])),
        (CHUNKED + b"1\r\na\r\n0\r\n\r\n", (200, [b"a"])),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\na\nb", (400, [b"a", b"b"])),
    ],
)
def test_a_stream_is_read_line_by_line(run_async, raw, expected):
    assert read_stream(run_async, RawServer(raw)) == expected


@pytest.mark.parametrize(
    ("raw", "connections"),
    [
        (CHUNKED + b"2\r\na\n\r\n0\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na\n", 1),
        (CHUNKED + b"2\r\na\n\r\n0\r\nx: y\r\n\r\n", 1),  # trailers
        (CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"2\r\na\n\r\n0\r\n\r\n", 2),
    ],
)
def test_a_stream_that_was_read_to_its_end_leaves_its_connection_for_the_next(run_async, raw, connections):
    async def scenario():
        async with RawServer(raw, raw) as server:
            channel = HttpChannel(server.url)
            for _ in range(2):
                async with channel.stream("/x", b"{}", 5.0) as stream:
                    assert [line async for lines in stream.lines() for line in lines] == [b"a"]
            channel.close()
            return server.connections

    assert run_async(scenario()) == connections


def test_a_stream_that_is_left_early_breaks_its_connection(run_async):
    async def scenario():
        raw = CHUNKED + b"2\r\na\n\r\n"
        async with RawServer(raw, raw) as server:
            channel = HttpChannel(server.url)
            for _ in range(2):
                async with channel.stream("/x", b"{}", 5.0) as stream:
                    await anext(stream.lines())
            channel.close()
            return server.connections

    assert run_async(scenario()) == 2


@pytest.mark.parametrize(
    "raw", [CHUNKED + b"5\r\na\nb", CHUNKED + b"zz\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"]
)
def test_a_stream_that_is_cut_off_is_a_connection_error(run_async, raw):
    with pytest.raises(ConnectionError, match="the stream broke"):
        read_stream(run_async, RawServer(raw, close=True))


def test_a_stream_that_is_closed_from_outside_ends_with_a_connection_error(run_async):
    with pytest.raises(ConnectionError):
        read_stream(run_async, RawServer(CHUNKED + b"2\r\na\n\r\n"), close_after=1)
