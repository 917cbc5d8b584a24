"""A streamed /generate call: events that come together are given together, and only what is needed is parsed."""

from __future__ import annotations

import asyncio
import json

import pytest

from slime_backend.engine_client import EngineClient, EngineProtocolError, EngineRefused, EngineUnreachable
from tests.serving import serving_raw


def event(ids, total, **more):
    return b"data: %b\n\n" % json.dumps({"output_ids": ids, "meta_info": {"completion_tokens": total}, **more}).encode()


DONE = b"data: [DONE]\n\n"


def answers(run_async, *writes, end=b"0\r\n\r\n", pace=lambda: 0.0):
    """(ids of each answer, batch by batch; connections) of two calls to a server that writes each of these at once."""

    async def scenario():
        connections = 0

        async def serve(reader, writer):
            nonlocal connections
            connections += 1
            while await reader.read(1 << 16):
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for raw in writes:
                    writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
                    await writer.drain()
                    await asyncio.sleep(0.05)
                if end is None:  # nothing more, and the connection stays open
                    continue
                writer.write(end)
                if not end:
                    return

        found = []
        async with serving_raw(serve) as url, EngineClient(url) as client:
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


@pytest.mark.parametrize("text", ["[DONE]", "data: [DONE]", "\n\ndata: [DONE]\n\n", "[DONE]\r\n"])
def test_a_text_that_looks_like_the_end_of_the_events_changes_nothing(run_async, text):
    """The first event has such a text; the stream is left alone behind it as behind any other."""
    for first in (event([1], 1, text=text), event([1], 1, text="plain")):  # the second is the control
        writes = (first, event([2], 2), event([3], 3) + DONE)
        assert answers(run_async, *writes, pace=lambda: 3600.0) == ([[[1]], [[2], [3]]], 1)


def test_an_answer_whose_http_never_ends_behind_the_last_event_is_given_up(run_async, monkeypatch):
    """Its connection isn't used again."""
    monkeypatch.setattr("slime_backend.engine_client.stream.LEFTOVER_S", 0.05)
    assert answers(run_async, event([1], 1) + DONE, end=None) == ([[[1]]], 2)


def test_a_connection_that_breaks_behind_the_end_costs_nothing(run_async):
    assert answers(run_async, event([1], 1) + DONE, end=b"") == ([[[1]]], 2)


@pytest.mark.parametrize(
    ("raw", "error", "told"),
    [
        (b'data: {"error": {"message": "no", "code": 400}}\n\n', EngineRefused, "HTTP 400: .*no"),
        (b"data: {\n\n", EngineProtocolError, "not JSON: {"),
        (b'data: {"meta_info": {}}\n\n', EngineProtocolError, "no output_ids"),
        (b"data: 5\n\n", EngineProtocolError, "no output_ids or meta_info in 5"),
        (b'data: "error"\n\n', EngineProtocolError, "no output_ids or meta_info in error"),
        (b'data: ["error"]\n\n', EngineProtocolError, "no output_ids"),
        (b"data: null\n\n", EngineProtocolError, "no output_ids"),
        (b'data: {"output_ids": 3, "meta_info": {}}\n\n', EngineProtocolError, "no output_ids"),
        (b'data: {"output_ids": [], "meta_info": []}\n\n', EngineProtocolError, "no output_ids"),
        (event([1], "one"), EngineProtocolError, "no output_ids"),
        (b"data: " + b"[" * 100_000 + b"\n\n", EngineProtocolError, "not JSON: "),
        (b"data: \xff\n\n", EngineProtocolError, "not JSON: "),
        (b'data: {"error": 5}\n\n', EngineRefused, "HTTP 400: 5"),
        (event([1], 1), EngineUnreachable, "ended before it was done"),
    ],
)
def test_faults(run_async, raw, error, told):
    with pytest.raises(error, match=told):
        answers(run_async, raw)
