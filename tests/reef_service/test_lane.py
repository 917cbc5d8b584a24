"""The routes that are served before FastAPI's layers: which they are, and that they refuse what is no request."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from reef_service.app import DATA_PLANE
from reef_service.lane import Lane
from slime_backend.simulation.http_messages import read_response
from tests.reef_service.harness import gateway_on


async def raw_post(client, path, content, *headers):
    """(status, JSON as text)."""
    parts = urlsplit(client.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(content)}", *headers]
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + content)
    message = await read_response(reader)
    writer.close()
    return message.status, message.body.decode()


def test_agents_routes_are_in_it_and_described(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path) as (client, _, _):
            return (await client.get("/openapi.json"))[1]["paths"]

    described = run_async(work())
    routes = Lane(None, None, [api.router for api in DATA_PLANE]).routes
    assert set(routes) == {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"}
    assert all("post" in described[path] for path in routes)


JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    ("content", "header", "message"),
    [
        (b'{"input_ids": [1]', JSON, "body: Invalid JSON"),
        (b"", JSON, "body: Invalid JSON"),
        (b"[]", JSON, "body: Input should be an object"),
        (b'{"input_ids": ["x"]}', JSON, "input_ids.0: Input should be a valid integer"),
        (b'{"text": "\\ud800"}', JSON, "body: Invalid JSON"),
        (b'{"input_ids": [1]}', "Content-Type: text/plain", "content-type is 'text/plain'; send JSON"),
        (b'{"input_ids": [1]}', "X: y", "content-type is ''; send JSON"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(tmp_path, run_async, content, header, message):
    async def work():
        async with gateway_on(tmp_path) as (client, _, fakes):
            answer = await raw_post(client, "/generate", content, header)
            assert not any(fake.bodies for fake in fakes)
            return answer

    status, body = run_async(work())
    assert (status, message in body) == (400, True), body


def test_any_json_type_will_do(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path) as (client, _, _):
            content = b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}'
            return await raw_post(client, "/generate", content, "Content-Type: application/vnd.x+json; charset=utf-8")

    assert run_async(work())[0] == 200
