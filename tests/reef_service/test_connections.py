"""Clients that are slow, many or too long, on real sockets; and a process with few descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from reef_service.config import GatewayConfig
from reef_service.connections import MAX_HEAD
from reef_service.descriptors import connections_that_fit, raise_limit, used
from reef_service.watch import MISSES
from slime_backend.config import ConfigError
from slime_backend.engine_client import EngineUncalled
from slime_backend.fleet.dispatch import generate
from slime_backend.simulation.fake_engine import FakeEngine
from tests.fake_fleet import fake_fleet, request
from tests.reef_service.gateway_process import GatewayProcess
from tests.reef_service.harness import Client, gateway_on, until

QUICK = {"head_s": 0.2, "body_s": 0.2, "idle_s": 0.2}
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SLOW = {
    "nothing": b"",
    "half a head": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: b",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "half a chunked body": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "a body on an open path": b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    "after an answer, nothing": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "after an answer, half a head": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /he",
}


async def opened(client, sent=b""):
    parts = urlsplit(client.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    writer.write(sent)
    return reader, writer


@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_connection_is_closed(tmp_path, run_async, kind):
    async def work():
        async with gateway_on(tmp_path, "yes", config=QUICK) as (client, gateway, _):
            reader, writer = await opened(client, SLOW[kind])
            await asyncio.wait_for(reader.read(), 30)  # until it ends
            writer.close()
            return await client.get("/healthz"), gateway.connections

    healthy, connections = run_async(work())
    assert healthy[0] == 200
    assert connections.timed_out == 1 or kind == "a body on an open path"
    assert not connections.idle


def test_a_long_answer_is_not_a_slow_connection(tmp_path, run_async):
    """The control: tokens come for longer than any of the bounds, to a client that sends nothing meanwhile."""

    async def work():
        async with gateway_on(tmp_path, config=QUICK, token_s=0.05) as (client, gateway, _):
            body = {"text": "a", "sampling_params": {"max_new_tokens": 20}}
            return await client.post("/generate", body), gateway.connections.timed_out

    (status, answer), timed_out = run_async(work())
    assert (status, len(answer["output_ids"]), timed_out) == (200, 20, 0)


@pytest.mark.parametrize("head", [b"X-A: " + b"a" * 300_000, b"X-A: b\r\n" * 20_000, b"GET /" + b"a" * 300_000])
def test_headers_are_bounded(tmp_path, run_async, head):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            first = b"" if head.startswith(b"GET") else b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
            reader, _ = await opened(client, first + head)
            answer = await asyncio.wait_for(reader.read(), 30)
            fits = b"X-A: " + b"a" * (MAX_HEAD - 1000) + b"\r\n\r\n"
            reader, _ = await opened(client, b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + fits)
            return answer, await reader.readline()

    answer, fine = run_async(work())
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b" 200 " in fine


@pytest.mark.parametrize("trailers", [b"0\r\n" + b"X-A: b\r\n" * 40_000, b"0\r\nX-A: " + b"a" * 300_000])
def test_trailers_are_bounded(tmp_path, run_async, trailers):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            reader, _ = await opened(client, HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + trailers)
            return await asyncio.wait_for(reader.readline(), 30)

    assert b" 431 " in run_async(work())


@pytest.mark.parametrize(
    ("path", "status"), [("/healthz", b" 200 "), ("/nothing", b" 401 "), ("/generate", b" 401 "), ("/", b" 200 ")]
)
@pytest.mark.parametrize("length", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_no_body_is_read_on_an_open_path_or_without_a_token(tmp_path, run_async, path, status, length):
    """The answer is there before the body is, and it ends the connection."""
    (tmp_path / "token").write_text("a" * 20)
    tokens = {"agent_token_file": tmp_path / "token", "admin_token_file": tmp_path / "token"}

    async def work():
        async with gateway_on(tmp_path, "yes", config=tokens) as (client, _, _):
            method = b"GET" if path == "/" or path == "/healthz" else b"POST"
            first = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            reader, _ = await opened(client, first + length + b"\r\n\r\n")
            return await asyncio.wait_for(reader.read(), 30)

    answer = run_async(work())
    assert status in answer.split(b"\r\n")[0]
    assert b"connection: close" in answer


def test_idle_connections_make_room_and_busy_ones_do_not(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, token_s=0.01, config={"max_concurrent": 8, "max_waiting": 4}) as (
            client,
            gateway,
            _,
        ):
            gateway.connections.most = 6
            idle = [await opened(client) for _ in range(6)]
            await until(lambda: len(gateway.connections.open) == 6)
            body = {"text": "a", "sampling_params": {"max_new_tokens": 400}, "stream": True}
            busy = [await client.send("POST", "/generate", body) for _ in range(6)]
            for reader, _ in busy:
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
            ended = [await asyncio.wait_for(reader.read(), 30) for reader, _ in idle]
            status, answer, headers = await client.call("GET", "/healthz")
            for _, writer in busy:
                writer.close()
            await until(lambda: not gateway.connections.open)
            return ended, status, answer, headers, await client.get("/healthz"), gateway.connections

    ended, status, answer, headers, after, connections = run_async(work())
    assert ended == [b""] * 6
    assert status == 503, (answer, connections.evicted, connections.turned_away)
    assert headers["retry-after"] == "1"
    assert "no connection left" in answer["error"]["message"]
    assert after[0] == 200
    assert (connections.evicted, connections.turned_away) == (6, 1)


# ---- descriptors


@contextmanager
def soft_limit(descriptors):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_descriptor():
    """This process has none left meanwhile."""
    with soft_limit(1 + max(int(name) for name in os.listdir("/proc/self/fd"))):
        held = []
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        try:
            yield
        finally:
            for one in held:
                os.close(one)


def test_the_soft_limit_is_raised():
    with soft_limit(256):
        assert raise_limit(512) == 512
        assert raise_limit(300) == 512  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512


def test_more_requests_than_fit_are_refused(monkeypatch):
    monkeypatch.setattr("reef_service.descriptors.raise_limit", lambda: 1024)
    with pytest.raises(ConfigError, match=r"max_waiting=1024 need \d+ file descriptors.* have 1024"):
        connections_that_fit(GatewayConfig(), 2)
    small = GatewayConfig(max_concurrent=64, max_waiting=128)
    assert 192 <= connections_that_fit(small, 2) < 1024 - 64 - used()
    with pytest.raises(ConfigError, match="max_connections=4096"):
        connections_that_fit(small.model_copy(update={"max_connections": 4096}), 2)


@pytest.mark.parametrize("stream", [True, False])
def test_without_a_descriptor_the_client_comes_again_and_no_engine_is_retired(tmp_path, run_async, monkeypatch, stream):
    """Real EMFILE: the calls to the engines have none left. With one again, all goes on."""
    monkeypatch.setattr("slime_backend.fleet.dispatch.LOCAL_S", 0.3)

    async def work():
        async with gateway_on(tmp_path, "yes", config={"watch_s": 60}) as (client, gateway, _):
            reader, writer = await opened(client)
            await client.get("/healthz")
            for member in gateway.fleet.members.values():
                member.client._channel.close()
            await asyncio.sleep(0.05)  # asyncio closes their sockets in its next round
            text = json.dumps({"text": "a", "stream": stream}).encode()
            with no_descriptor():
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
                for member in [*gateway.fleet.members.values()] * (MISSES + 1):
                    await gateway.watch._look(member)
            after = await client.post("/generate", {"text": "a"})
            return head.lower(), after[0], [(m.status, m.reason) for m in gateway.fleet.members.values()]

    head, after, members = run_async(work())
    assert b" 503 " in head
    assert b"retry-after: 1" in head
    assert after == 200
    assert members == [("confirmed", "")] * 2


def test_a_fleet_without_a_descriptor_is_typed(run_async, monkeypatch):
    monkeypatch.setattr("slime_backend.fleet.dispatch.LOCAL_S", 0.1)

    async def work():
        async with fake_fleet(1) as (fleet, _):
            fleet.members["engine0"].client._channel.close()
            await asyncio.sleep(0.05)  # asyncio closes its sockets in its next round
            with no_descriptor(), pytest.raises(EngineUncalled, match="Too many open files"):
                await generate(fleet, request(2))
            return (await generate(fleet, request(2))).engine

    assert run_async(work()) == "engine0"


@pytest.mark.timeout(180)
def test_a_crowd_without_a_token_takes_no_engine(tmp_path, run_async):
    """A gateway of 700 descriptors, 1000 idle connections, then agents: all are answered, and no engine is retired."""
    raise_limit(8192)

    async def work():
        async with FakeEngine(token_s=0.001) as one, FakeEngine(token_s=0.001) as two:
            settings = ("gateway.max_concurrent=32", "gateway.max_waiting=128")
            gateway = GatewayProcess(tmp_path, [one.url, two.url], *settings)
            gateway.command = ["bash", "-c", 'ulimit -n 700; exec "$@"', "limited", *gateway.command]
            await asyncio.to_thread(gateway.start)
            idle = []
            try:
                client = Client(gateway.url)
                for _ in range(1000):
                    with suppress(OSError):
                        idle.append(await opened(client))
                body = {"text": "a", "sampling_params": {"max_new_tokens": 20}}
                answers = await asyncio.gather(*(client.post("/generate", body) for _ in range(40)))
                return [status for status, _ in answers], (await client.get("/reef/state"))[1]["engines"]
            finally:
                for _, writer in idle:
                    writer.close()
                await asyncio.to_thread(gateway.end)

    statuses, engines = run_async(work(), 170)
    assert statuses == [200] * 40
    assert [(e["status"], e["reason"]) for e in engines] == [("confirmed", "")] * 2


def test_a_start_that_cannot_fit_is_one_line():
    command = [sys.executable, "-m", "slime_backend.cli", "serve", "configs/gateway_cpu.yaml"]
    command += ["--set", "gateway.engines=[http://127.0.0.1:9]"]
    limited = ["bash", "-c", 'ulimit -n 1024; exec "$@"', "limited", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2, done.stderr
    assert "file descriptors, and this process may have 1024" in done.stderr
    assert done.stderr.strip().count("\n") == 0
