"""A streamed /generate call: events that come together are given together, and only what is needed is parsed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from slime_backend.engine_client import EngineClient, EngineProtocolError, EngineRefused, EngineUnreachable


def event(ids, total):
    return b"data: %b\n\n" % json.dumps({"output_ids": ids, "meta_info": {"completion_tokens": total}}).encode()


DONE = b"data: [DONE]\n\n"


def answers(run_async, *writes, end=b"0\r\n\r\n", pace=lambda: 0.0):
    """(ids of each answer, batch by batch; connections) of two calls to a server that writes each of these at once."""

    async def scenario():
        connections = 0

        async def serve(reader, writer):
            nonlocal connections
            connections += 1
            with suppress(asyncio.CancelledError):  # by the end of the test; asyncio would log it (Python 3.11)
                while await reader.read(1 << 16):
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    for raw in writes:
                        writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
                        await writer.drain()
                        await asyncio.sleep(0.05)
                    writer.write(end)
                    if not end:
                        writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        found = []
        async with server, EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            for _ in range(2):
                async with client.generate_stream({"input_ids": [1]}) as stream:
                    found = [[answer["output_ids"] for answer in batch] async for batch in stream.answers(pace)]
        return found, connections

    return run_async(scenario())


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ((event([1], 1), event([2], 2), event([3], 3) + DONE), [[[1]], [[2]], [[3]]]),
        ((event([1], 1) + event([2, 3], 3) + event([4], 4), DONE), [[[1], [2, 3], [4]]]),
        ((event([1], 1) + event([1, 2], 2) + event([1, 2, 3], 3), DONE), [[[1, 2, 3]]]),  # the last repeats the others
        ((event([1], 1)[:9], event([1], 1)[9:] + DONE + event([9], 9)), [[[1]]]),
    ],
)
def test_what_has_come_is_given_together_and_the_connection_used_again(run_async, writes, expected):
    assert answers(run_async, *writes) == (expected, 1)


def test_a_stream_that_is_left_alone_is_read_together_up_to_its_end(run_async):
    """For an hour, if it didn't end."""
    writes = (event([1], 1), event([2], 2), event([3], 3) + DONE)
    assert answers(run_async, *writes, pace=lambda: 3600.0) == ([[[1]], [[2], [3]]], 1)
    with pytest.raises(EngineUnreachable):
        answers(run_async, event([1], 1), event([2], 2), pace=lambda: 3600.0, end=b"")


def test_a_connection_that_breaks_behind_the_end_costs_nothing(run_async):
    assert answers(run_async, event([1], 1) + DONE, end=b"") == ([[[1]]], 2)


@pytest.mark.parametrize(
    ("raw", "error", "told"),
    [
        (b'data: {"error": {"message": "no", "code": 400}}\n\n', EngineRefused, "HTTP 400: .*no"),
        (b"data: {\n\n", EngineProtocolError, "not JSON: {"),
        (b'data: {"meta_info": {}}\n\n', EngineProtocolError, "no output_ids"),
        (event([1], 1), EngineUnreachable, "ended before it was done"),
    ],
)
def test_faults(run_async, raw, error, told):
    with pytest.raises(error, match=told):
        answers(run_async, raw)
