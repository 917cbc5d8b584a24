"""Tokens, limits, and that no secret gets anywhere."""

from __future__ import annotations

import json
import logging

import pytest

from reef_service.config import gateway_config
from reef_service.security import Tokens, needed, read_token
from slime_backend.config import ConfigError
from tests.reef_service.harness import gateway_on

AGENT, ADMIN = "agent-token-of-16-letters", "admin-token-of-16-letters"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "agent").write_text(AGENT + "\n")
    (tmp_path / "admin").write_text(ADMIN + "\n")
    return {"agent_token_file": tmp_path / "agent", "admin_token_file": tmp_path / "admin"}


@pytest.mark.parametrize(
    ("path", "body", "anybody", "agent"),
    [
        ("/healthz", None, 200, 200),
        ("/readyz", None, 200, 200),
        ("/", None, 200, 200),
        ("/openapi.json", None, 200, 200),
        ("/v1/models", None, 401, 200),
        ("/v1/chat/completions", CHAT, 401, 200),
        ("/v1/messages", CHAT, 401, 200),
        ("/v1/completions", {"prompt": "x"}, 401, 200),
        ("/generate", {"input_ids": [1]}, 401, 200),
        ("/reef/report", {"id": "r", "session": "none"}, 401, 404),
        ("/reef/turns/none", None, 401, 404),
        ("/reef/batches", None, 401, 403),
        ("/reef/state", None, 401, 403),
        ("/reef/publications", None, 401, 403),
        ("/metrics", None, 401, 403),
        ("/unknown", None, 401, 403),
        ("//reef/batches", None, 401, 403),
    ],
)
def test_who_may_do_what(tmp_path, run_async, tokens, path, body, anybody, agent):
    async def work():
        async with gateway_on(tmp_path, "yes", config=tokens) as (client, _, _):
            method = "GET" if body is None else "POST"
            found = []
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": f"Bearer {AGENT}"},
                {"x_api_key": ADMIN},
            ):
                found.append((await client.call(method, path, body, **headers))[0])
            return found

    nobody, wrong, as_agent, as_admin = run_async(work())
    assert (nobody, wrong, as_agent) == (anybody, anybody, agent)
    assert as_admin not in (401, 403)


def test_no_secret_in_logs_store_or_answers(tmp_path, run_async, tokens, caplog):
    caplog.set_level(logging.DEBUG)

    async def work():
        async with gateway_on(tmp_path, "yes", config=tokens) as (client, gateway, _):
            answers = []
            for token in (AGENT, ADMIN, "wrong-but-secret-all-the-same"):
                for path in ("/v1/chat/completions", "/reef/batches", "/reef/nothing"):
                    answers.append(str(await client.call("POST", path, CHAT, authorization=f"Bearer {token}")))
            answers.append(str(await client.get("/metrics", authorization=f"Bearer {ADMIN}")))
            answers.append(json.dumps(await gateway.state()))
            return answers

    texts = [*run_async(work()), caplog.text]
    texts += [path.read_bytes().decode("latin-1") for path in tmp_path.glob("gateway.sqlite*")]
    for secret in (AGENT, ADMIN, "wrong-but-secret-all-the-same"):
        assert not any(secret in text for text in texts)


def test_tokens_are_compared_by_digest():
    tokens = Tokens(AGENT, ADMIN)
    assert [tokens.role(t) for t in (None, "", "x", AGENT, ADMIN, AGENT + "x")] == [
        "open", "open", "open", "agent", "admin", "open",
    ]  # fmt: skip
    assert Tokens(None, ADMIN).role("\0" * 32) == "open"
    assert Tokens(None, None).role(None) == "admin"
    assert needed("/static/app.js") == "open"
    assert needed("/static") == "admin"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"host": "0.0.0.0"},
            "host=0.0.0.0 is reachable from other machines; give agent_token_file and admin_token_file",
        ),
        ({"host": "0.0.0.0", "agent_token_file": "a"}, "is reachable from other machines"),
        ({"host": "example.org"}, "is reachable from other machines"),
        ({"prot": 1}, "unknown key 'prot'; did you mean 'port'?"),
        ({"port": 70000}, "gateway.port=70000"),
        ({"engines": ["http://a", "http://a"]}, "engines names one engine twice"),
    ],
)
def test_unsafe_and_wrong_settings_are_one_line(section, expected):
    with pytest.raises(ConfigError, match=r"c\.yaml: gateway") as refused:
        gateway_config(section, "c.yaml")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_no_tokens(host):
    assert gateway_config({"host": host}, "c.yaml").host == host


def test_a_bad_token_file_is_one_line_without_the_token(tmp_path):
    (tmp_path / "short").write_text("hunter2\n")
    for path in (tmp_path / "short", tmp_path / "none"):
        with pytest.raises(ConfigError, match="token file") as refused:
            read_token(path)
        assert "hunter2" not in str(refused.value)


def test_limits(tmp_path, run_async):
    limits = {
        "max_body_mib": 0.01,
        "max_prompt_tokens": 50,
        "max_output_tokens": 5,
        "max_concurrent": 1,
        "max_waiting": 0,
    }

    async def work():
        async with gateway_on(tmp_path, "a long answer", config=limits) as (client, gateway, _):
            big = await client.call("POST", "/generate", {"text": "x" * 20_000})
            long = await client.call("POST", "/generate", {"text": "x" * 60})
            cut = await client.call("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 9})
            async with gateway.plane.gate.passed():
                busy = await client.call("POST", "/v1/chat/completions", CHAT)
            return big, long, cut, busy

    big, long, cut, busy = run_async(work())
    assert big[0] == 413
    assert long[0] == 400
    assert "the prompt has 60 tokens; at most 50 are taken" in long[1]["error"]["message"]
    assert (cut[0], cut[1]["usage"]["completion_tokens"]) == (200, 5)
    assert busy[0] == 503
    assert busy[2]["retry-after"] == "1"


def test_a_body_of_unknown_length_is_bounded_too(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", config={"max_body_mib": 0.01}) as (client, _, _):
            import asyncio
            from urllib.parse import urlsplit

            parts = urlsplit(client.url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"3000\r\n" + b"x" * 0x3000 + b"\r\n")
            return await reader.readuntil(b"\r\n")

    assert b" 413 " in run_async(work())
