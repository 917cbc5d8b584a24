"""What a browser sends for a page of somebody else: refused on every path that isn't open, and nothing has changed."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from reef_service.app import make_inner
from reef_service.security import needed
from slime_backend.simulation.http_messages import read_response
from tests.reef_service.harness import gateway_on

FOREIGN = {
    "a form": {"content-type": "application/x-www-form-urlencoded"},
    "a plain POST": {"content-type": "text/plain"},
    "no content type": {},
    "another origin": {"content-type": "application/json", "origin": "http://evil.example"},
    "another port": {"content-type": "application/json", "origin": "http://127.0.0.1:1"},
    "a sandbox": {"content-type": "application/json", "origin": "null"},
    "cross-site": {"content-type": "application/json", "sec-fetch-site": "cross-site"},
    "a rebound name": {"content-type": "application/json", "host": "rebind.evil.example"},
    "a rebound name with a port": {"content-type": "application/json", "host": "rebind.evil.example:8700"},
}


async def send(client, method, path, headers, body=b"{}"):
    """(status, text), with no header but these and what a request must have."""
    parts = urlsplit(client.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    headers = {"host": parts.netloc, "connection": "close", "content-length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    message = await read_response(reader)
    writer.close()
    return message.status, message.body.decode()


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_page_of_another_origin_takes_or_trains_samples(tmp_path, run_async, kind):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            await client.post("/v1/chat/completions", chat, x_reef_session="s")
            await client.post("/reef/report", {"id": "r", "session": "s", "score": 1})
            await client.post("/reef/batches", {"lease": "mine"})
            paths = [
                path.replace("{lease}", "mine")
                for path, operations in make_inner(gateway).openapi()["paths"].items()
                if "post" in operations and needed(path) != "open"
            ]
            found = {path: await send(client, "POST", path, FOREIGN[kind]) for path in paths}
            return found, await gateway.store.counts(), gateway.fleet.version

    found, counts, version = run_async(work())
    assert len(found) >= 9
    assert {status for status, _ in found.values()} <= {400, 403, 415}, found
    assert (counts["trained"], counts["leased"], version) == (0, 1, "v0")


@pytest.mark.parametrize("kind", ["another origin", "cross-site", "a rebound name"])
def test_nor_does_it_read(tmp_path, run_async, kind):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            headers = FOREIGN[kind]
            return [
                (await send(client, "GET", path, headers, b""))[0] for path in ("/reef/state", "/metrics", "/healthz")
            ]

    assert run_async(work()) == [403, 403, 200]


def test_samples_are_not_taken_by_get(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return await client.call("GET", "/reef/batches?limit=4&lease=evil")

    status, answer, headers = run_async(work())
    assert (status, headers["allow"]) == (405, "POST")
    assert "POST /reef/batches" in answer["error"]["message"]


def test_the_own_page_and_named_hosts_are_let_in(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", config={"allowed_hosts": ["reef.example"]}) as (client, _, _):
            netloc = urlsplit(client.url).netloc
            json = {"content-type": "application/json"}
            allowed = [
                {**json, "origin": f"http://{netloc}", "sec-fetch-site": "same-origin"},
                {**json, "host": "reef.example:80", "origin": "http://reef.example:80"},
                {**json, "host": "localhost"},
                {**json, "host": "[::1]:8700"},
                {**json, "host": "gateway"},
            ]
            return [(await send(client, "POST", "/reef/batches", headers))[0] for headers in allowed]

    assert run_async(work()) == [200] * 5


def test_with_tokens_any_host_is_served(tmp_path, run_async):
    """A foreign page has no token; a proxy in front of the gateway has its own name."""
    (tmp_path / "token").write_text("a" * 20)
    tokens = {"agent_token_file": tmp_path / "token", "admin_token_file": tmp_path / "token"}

    async def work():
        async with gateway_on(tmp_path, "yes", config=tokens) as (client, _, _):
            headers = {"content-type": "application/json", "host": "any.example", "x-api-key": "a" * 20}
            foreign = {**headers, "origin": "http://evil.example"}
            return [(await send(client, "POST", "/reef/batches", h))[0] for h in (headers, foreign)]

    assert run_async(work()) == [200, 403]


def test_the_description_says_what_token_a_path_wants(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return (await client.get("/openapi.json"))[1]

    found = run_async(work())
    assert set(found["components"]["securitySchemes"]) == {"bearer", "key"}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (needed(path) != "open"), path


def test_a_token_file_that_is_no_text_is_one_line(tmp_path):
    from reef_service.security import read_token
    from slime_backend.config import ConfigError

    (tmp_path / "token").write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_token(tmp_path / "token")
