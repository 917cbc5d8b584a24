"""Large requests: refused before they are worked on where they can't fit, else worked on outside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from reef_service.data_plane import workers
from reef_service.data_plane.json_size import more_values_than
from reef_service.text.tokenizer import ModelTokenizer, TooManyTokens
from tests.reef_service.harness import gateway_on, make_model, until

MIB = 2**20
WORDS = "the sea is calm tonight, " * (MIB // 25)


def body(size):
    return {"messages": [{"role": "user", "content": (WORDS * (size // len(WORDS) + 1))[:size]}], "max_tokens": 4}


def test_values_are_counted_without_parsing():
    assert not more_values_than(b'{"a":"' + b"x,[{" * 1000 + b'"}', 10)
    assert not more_values_than(json.dumps({"a": 'q"\\",[' * 1000, "b": "\\"}).encode(), 10)
    assert more_values_than(b'{"x":[' + b"[]," * 1000 + b"1]}", 10)
    assert more_values_than(b"[" + b'"a",' * 1000 + b"1]", 10)
    assert more_values_than(b'{"a":"\\\\",' + b'"b":1,' * 100 + b'"c":2}', 10)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_what_cannot_fit_is_refused_before_it_is_tokenized(tmp_path, run_async, monkeypatch, path):
    """By its characters: a token is of so many at most."""
    seen = []
    monkeypatch.setattr(ModelTokenizer, "_encoded", lambda self, text, special: seen.append(len(text)))

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            return await client.post(path, body(2 * MIB)), gateway.plane.limits

    (status, answer), limits = run_async(work())
    assert status == 400
    assert "characters, which are more than" in answer["error"]["message"]
    assert (limits.most, seen) == (8191, [])


def test_a_prompt_of_too_many_tokens_is_refused_after_the_first_pieces(tmp_path):
    tokenizer = ModelTokenizer(make_model(tmp_path))
    pieces = []

    with pytest.raises(TooManyTokens):
        tokenizer.encode_large(WORDS * 8, 200_000, lambda: pieces.append(1))
    assert len(pieces) == 2
    assert tokenizer.encode_large(WORDS, 2 * MIB, lambda: None) == tokenizer.encode(WORDS)


def test_large_prompts_are_worked_on_beside_the_loop(tmp_path, run_async, monkeypatch):
    """While one is tokenized for as long as it likes, others are answered; the tokens are the same."""
    go, inside, threads = threading.Event(), threading.Event(), []
    own = ModelTokenizer.encode_large

    def slow(self, *args, **kwargs):
        threads.append(threading.current_thread())
        inside.set()
        assert go.wait(60)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(ModelTokenizer, "encode_large", slow)

    async def work():
        async with gateway_on(tmp_path, "yes", config={"context_length": 100_000}) as (client, gateway, engines):
            large = asyncio.create_task(client.post("/v1/chat/completions", body(40_000)))
            await until(inside.is_set)
            small = await client.post("/v1/chat/completions", body(100))
            healthy = await client.get("/healthz")
            go.set()
            answer = await large
            sent = max((b["input_ids"] for e in engines for b in e.bodies), key=len)
            text = gateway.plane.tokenizer.template.render(body(40_000)["messages"], tools=None, options={})
            return small[0], healthy[0], answer[0], sent == gateway.plane.tokenizer.encode(text)

    assert run_async(work()) == (200, 200, 200, True)
    assert threading.main_thread() not in threads


def test_a_client_that_leaves_ends_the_work_on_its_prompt(tmp_path, run_async, monkeypatch):
    ended, inside, go = threading.Event(), threading.Event(), threading.Event()

    def slow(self, text, most, check, *, special=False):
        inside.set()
        assert go.wait(60)
        try:
            check()
        except workers.GivenUp:
            ended.set()
            raise
        return [1]

    monkeypatch.setattr(ModelTokenizer, "encode_large", slow)

    async def work():
        async with gateway_on(tmp_path, "yes", config={"context_length": 100_000}) as (client, _, engines):
            _, writer = await client.send("POST", "/v1/chat/completions", body(40_000))
            await until(inside.is_set)
            writer.close()
            await asyncio.sleep(0.2)
            go.set()
            await until(ended.is_set)
            return [len(e.bodies) for e in engines], (await client.get("/healthz"))[0]

    assert run_async(work()) == ([0, 0], 200)


@pytest.mark.parametrize("raw", [b'{"x":[' + b"[]," * 600_000 + b"1]}", b'{"input_ids":[' + b"1," * 600_000 + b"1]}"])
def test_more_values_than_a_prompt_can_have_are_refused_unparsed(tmp_path, run_async, raw):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            from urllib.parse import urlsplit

            parts = urlsplit(client.url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            )
            writer.write(b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            return await reader.read()

    answer = run_async(work())
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"values" in answer


def test_what_is_no_prompt_has_small_bodies(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            report = {"id": "a", "receipts": ["a"] * 400_000}
            return await client.post("/reef/report", report)

    assert run_async(work())[0] == 413


@pytest.mark.parametrize("arguments", ["[" * 50_000, "[" * 500 + "]" * 500, '"\\ud800"', '{"a": "\\ud800"}', "{"])
def test_arguments_of_any_form_are_a_text(tmp_path, run_async, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]

    async def work():
        async with gateway_on(tmp_path, "yes", config={"context_length": 200_000}) as (client, _, _):
            return await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    status, answer = run_async(work())
    assert status == 200, answer


@pytest.mark.parametrize("arguments", ["[" * 3000 + "]" * 3000, '{"a": "\\ud800"}'])
def test_a_model_may_write_such_calls_too(tmp_path, run_async, arguments):
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def work():
        async with gateway_on(tmp_path, text) as (client, _, _):
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 7000}
            return await client.post("/v1/chat/completions", body)

    status, answer = run_async(work())
    assert status == 200
    assert answer["choices"][0]["message"]["content"].startswith("<tool_call>")
