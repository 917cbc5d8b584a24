"""Small things that agents, proxies and disks do to a gateway."""

from __future__ import annotations

import asyncio
import resource
from contextlib import contextmanager
from typing import Any

import pytest

from reef_service.store import StoreError
from tests.reef_service.harness import gateway_on

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextmanager
def full_disk(directory):
    """No file of this process grows: what a full disk is to the store."""
    size = max(path.stat().st_size for path in directory.glob("gateway.sqlite*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(size, 4096), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_gateway_whose_disk_is_full_is_not_ready(tmp_path, run_async, monkeypatch):
    monkeypatch.setattr("reef_service.gateway.PROBE_S", 0.0)

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            before = await client.get("/readyz")
            with full_disk(tmp_path):
                full = await client.get("/readyz")
                answer = await client.post("/v1/chat/completions", CHAT)
            return before, full, answer[0], await client.get("/readyz")

    before, full, answer, after = run_async(work())
    assert (before[0], after[0]) == (200, 200)
    assert full == (503, {"ready": False, "reasons": ["the store doesn't write"]})
    assert answer == 503


def test_many_who_ask_cost_one_write(tmp_path, run_async, monkeypatch):
    monkeypatch.setattr("reef_service.gateway.PROBE_S", 600.0)

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            before = gateway.store.writer.operations
            found = await asyncio.gather(*(client.get("/readyz") for _ in range(20)))
            return [status for status, _ in found], gateway.store.writer.operations - before

    assert run_async(work()) == ([200] * 20, 1)


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/v1/models", "/openapi.json"])
def test_head_is_get_without_a_body(tmp_path, run_async, path):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            reader, _ = await client.send("HEAD", path)
            return await reader.read()

    head, body = run_async(work()).split(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert body == b""


def test_no_identifier_has_a_nul(tmp_path, run_async, store_url):
    """PostgreSQL takes none in any text: the client's fault, not the store's."""

    async def work():
        async with gateway_on(tmp_path, "yes", url=store_url) as (client, _, _):
            return [
                (await client.post("/reef/report", {"id": "a\0", "session": "s"}))[0],
                (await client.post("/reef/report", {"id": "a", "session": "s\0"}))[0],
                (await client.post("/reef/report", {"id": "a", "receipts": ["r\0"]}))[0],
                (await client.post("/reef/batches", {"holder": "me\0"}))[0],
                (await client.post("/reef/batches/a%00b/ack", {}))[0],
                (await client.get("/reef/turns/a%00b"))[0],
            ]

    assert run_async(work()) == [400, 400, 400, 400, 404, 404]


def test_agents_do_not_learn_where_the_store_is(tmp_path, run_async, monkeypatch, caplog):
    async def broken(receipt):
        raise StoreError('the store can\'t be read: connection to server at "10.0.0.7", port 5432 failed')

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            monkeypatch.setattr(type(gateway.store), "turn", lambda self, receipt: broken(receipt))
            return await client.call("GET", "/reef/turns/x")

    status, answer, headers = run_async(work())
    assert (status, headers["retry-after"]) == (503, "1")
    assert "10.0.0.7" not in str(answer)
    assert "10.0.0.7" in caplog.text


def test_offsets_of_a_completions_tokens(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return await client.post("/v1/completions", {"prompt": "a", "logprobs": 0, "max_tokens": 3})

    _, answer = run_async(work())
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]


def test_of_two_turns_alike_the_later_one_goes_on(tmp_path, run_async):
    """A client that asked twice has the second answer, even where both read the same."""

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            for _ in range(2):
                await client.post("/v1/chat/completions", CHAT, x_reef_session="s")
            asked: Any = CHAT["messages"]
            messages = [*asked, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
            await client.post("/v1/chat/completions", {**CHAT, "messages": messages}, x_reef_session="s")
            turns = [r for r in gateway.store.records() if r.session == "s"]
            found = [await gateway.store.turn(r.receipt) for r in sorted(turns, key=lambda r: r.finished_at)]
            return [turn["receipt"] for turn in found], found[-1]["parent"]

    receipts, parent = run_async(work())
    assert parent == receipts[1]
