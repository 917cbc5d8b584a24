"""Engines that want keys. The guard of these fake engines is SGLang's own decision, so this needs sglang installed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slime_backend.cli.engines import publish_checkpoint
from slime_backend.config import ConfigError, load_config
from slime_backend.engine_client import EngineClient, EngineRefused
from slime_backend.engine_client.keys import EngineKeys, KeyMissing, keys_in_flags, read_keys, without_keys
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.http_server import HttpServer, Reply
from slime_backend.simulation.transport import NameTransport
from slime_backend.wire import REPORTS_PATH

auth = pytest.importorskip("sglang.srt.utils.auth")
DESCRIBES = {"/generate", "/server_info", "/model_info", REPORTS_PATH}  # no @auth_level in http_server.py, nor in ours


@asynccontextmanager
async def guarded(api, admin):
    engine = FakeEngine()

    def guard(message):
        method, path = message.method, message.path
        decision = auth.decide_request_auth(
            method=method,
            path=path,
            authorization_header=message.headers.get("authorization"),
            api_key=api or None,
            admin_api_key=admin or None,
            auth_level=auth.AuthLevel.NORMAL if path in DESCRIBES else auth.AuthLevel.ADMIN_OPTIONAL,
        )
        return None if decision.allowed else Reply({"error": "Unauthorized"}, decision.error_status_code)

    engine._server = HttpServer(engine._handle, guard)
    async with engine:
        yield engine


@pytest.mark.parametrize(("api", "admin"), [("a-key", ""), ("", "b-key"), ("a-key", "b-key"), ("", "")])
def test_every_call_brings_the_key_that_it_needs(api, admin, run_async):
    async def scenario():
        async with guarded(api, admin) as engine, EngineClient(engine.url, keys=EngineKeys(api, admin)) as client:
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            await admit(fleet, client)
            report = await publish(fleet, NameTransport(), "v1")
            assert (report.state, report.unconfirmed) == ("resumed", {})
            async with client.weight_session():
                pass
            await client.abort("r")
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}
            assert len((await client.generate(body))["output_ids"]) == 3
            async with client.generate_stream(body) as stream:
                answers = [a async for several in stream.answers() for a in several]
            assert len(answers[-1]["output_ids"]) == 3

    run_async(scenario())


async def streamed(client):
    async with client.generate_stream({"input_ids": [1]}):
        pass


@pytest.mark.parametrize(
    ("keys", "call", "names"),
    [
        (EngineKeys(), "reports", "wants a key: set the environment variable REEF_SLIME_ENGINE_API_KEY"),
        (EngineKeys(api="a-key"), "resume", "isn't the engine's: .* REEF_SLIME_ENGINE_ADMIN_API_KEY"),
        (EngineKeys("wrong-secret", "b-key", "MINE"), "reports", "isn't the engine's: .* MINE to its --api-key"),
        (EngineKeys(), "stream", "wants a key"),
    ],
)
def test_a_refused_key_is_one_line_without_the_key(keys, call, names, run_async):
    async def scenario():
        async with guarded("a-key", "b-key") as engine, EngineClient(engine.url, keys=keys) as client:
            with pytest.raises(EngineRefused, match=names) as caught:
                await getattr(client, call)() if call != "stream" else await streamed(client)
            text = f"{caught.value} {client!r} {keys!r}"
            assert not any(secret in text for secret in ("a-key", "b-key", "wrong-secret"))
            assert "\n" not in str(caught.value)

    run_async(scenario())


def test_the_command_publishes_with_keys_from_variables(tiny_model_b, monkeypatch, run_async):
    async def scenario():
        async with guarded("a-key", "b-key") as engine:
            policy = decide("disjoint", "retract")
            with pytest.raises(EngineRefused, match="REEF_SLIME_ENGINE_API_KEY"):
                await publish_checkpoint(policy, [engine.url], tiny_model_b, "v1", frozenset())
            monkeypatch.setenv("OURS", "a-key\n")
            monkeypatch.setenv("REEF_SLIME_ENGINE_ADMIN_API_KEY", "b-key")
            keys = read_keys("OURS")
            report = await publish_checkpoint(policy, [engine.url], tiny_model_b, "v1", frozenset(), keys=keys)
            assert report.state == "resumed"

    run_async(scenario())


def test_a_named_variable_must_be_set():
    with pytest.raises(KeyMissing, match="variable NOWHERE"):
        read_keys("NOWHERE", environment={})
    with pytest.raises(KeyMissing, match="REEF_SLIME_ENGINE_API_KEY holds no key") as caught:
        read_keys(environment={"REEF_SLIME_ENGINE_API_KEY": "a\r\nX-Other: 1"})
    assert "X-Other" not in str(caught.value)
    assert read_keys(environment={}).header("/generate") == ""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "slime_backend.cli",
            "doctor",
            "--engine",
            "http://127.0.0.1:9",
            "--api-key-env",
            "NOWHERE",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "NOWHERE" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_flags_of_engines_that_are_started_give_their_keys_and_are_not_written_down():
    flags = ["--api-key", "a-key", "--tp-size", "2", "--admin-api-key=b-key"]
    overrides = [f"engine_flags={json.dumps(flags)}"]
    config = load_config(Path("configs/cpu_tiny.yaml"), overrides)
    assert (config.engines.keys_to_send.api, config.engines.keys_to_send.admin) == ("a-key", "b-key")
    assert "key'" not in str(config.to_record()["engine_flags"]).replace("--api-key'", "")
    assert without_keys(flags) == ["--api-key", "***", "--tp-size", "2", "--admin-api-key=***"]
    for nothing in ([], ["--api-key"], ["--tp-size", "2"]):
        assert keys_in_flags(nothing, EngineKeys(api="x")).api == "x"
    with pytest.raises(ConfigError, match="NOWHERE"):
        _ = load_config(Path("configs/cpu_tiny.yaml"), ["engine_api_key_env=NOWHERE"]).engines.keys_to_send
