"""`doctor` and `publish` against real engines that somebody else started."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import EngineSettings, LocalEngine, running_engines
from slime_backend.fleet.doctor import diagnose
from slime_backend.policy import decide

pytestmark = pytest.mark.engine


def cli(*args):
    return subprocess.run(
        [sys.executable, "-m", "slime_backend.cli", *args], capture_output=True, text=True, timeout=300
    )


def test_doctor_on_an_engine_with_the_plugin(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url) as client:
            before = await client.weight_version()
            diagnosis = await diagnose(client)
            reports = await client.reports()
            return before, diagnosis, await client.weight_version(), reports

    before, diagnosis, after, reports = run_async(scenario(), 300)
    verdicts = {f.check: f.verdict for f in diagnosis.findings}
    for check in (
        "retract pause",
        "in-place pause",
        "label",
        "weight digests",
        "sampled spans",
        "prefix sharing",
        "kv evidence",
    ):
        assert verdicts[check] == "holds", diagnosis
    assert verdicts["flush after a retract"] == "holds"
    assert verdicts["no other KV holder"] == "holds"
    # This engine was started without the scope hook, and with its radix cache on.
    assert verdicts["scope"] == "does not hold"
    assert verdicts["radix cache off"] == "does not hold"
    assert diagnosis.unsafe_for(decide("disjoint", "retract")) == []
    assert any(reason.startswith("scope") for reason in diagnosis.unsafe_for(decide("disjoint", "scoped")))
    assert any(reason.startswith("radix") for reason in diagnosis.unsafe_for(decide("disjoint", "off")))
    # It left no trace: running, and with its own label.
    assert after == before
    assert not reports[0].kv.paused


@pytest.mark.soak
def test_doctor_exit_code_says_whether_the_configured_policy_is_safe(engine):
    done = cli("doctor", "--engine", engine.url, "--disjoint-prefix-sharing", "off", "--json")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["engines"][0]["unsafe"]


@pytest.mark.soak
def test_doctor_and_publish_on_an_engine_without_the_plugin(tiny_model, tmp_path):
    """Nothing can be verified there: doctor says so, publish refuses to start."""
    settings = EngineSettings(model=str(tiny_model), hooks=(), max_total_tokens=20000)
    with running_engines([LocalEngine(settings, log_path=tmp_path / "log")]) as (plain,):

        async def scenario():
            async with EngineClient(plain.url) as client:
                return await diagnose(client)

        diagnosis = asyncio.run(scenario())
        verdicts = {f.check: f.verdict for f in diagnosis.findings}
        assert verdicts["kv evidence"] == "does not hold"
        assert verdicts["flush after a retract"] == "holds"  # seen from outside, by cached_tokens
        assert any(r.startswith("kv evidence") for r in diagnosis.unsafe_for(decide("disjoint", "retract")))
        done = cli("publish", "--checkpoint", str(tiny_model), "--version", "v1", "--engine", plain.url)
        assert done.returncode == 1
        assert "REEF_SLIME_HOOKS" in done.stderr
        assert "Traceback" not in done.stderr


def test_publish_from_the_command_line(engine, tiny_model_b, run_async):
    done = cli("publish", "--checkpoint", str(tiny_model_b), "--version", "cli-1", "--engine", engine.url, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["state"] == "resumed"
    assert report["engines"][0]["flush_verified"]
    assert report["engines"][0]["confirmed"]

    async def label():
        async with EngineClient(engine.url) as client:
            return await client.weight_version()

    assert run_async(label()) == "cli-1"


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["--checkpoint", "no/dir", "--version", "x"], 1, "no Hugging Face checkpoint"),
        (["--checkpoint", "no/dir", "--version", "x", "--disjoint-prefix-sharing", "maybe"], 2, "'maybe' is unknown"),
        (
            ["--checkpoint", "no/dir", "--version", "x", "--disjoint-prefix-sharing", "off"],
            1,
            "turns the radix cache on",
        ),
        (["--checkpoint", "no/dir", "--version", "x", "--allow-kv-holder", "moon"], 2, "moon is unknown; there are"),
    ],
)
def test_bad_input_to_publish(engine, args, code, expected):
    done = cli("publish", "--engine", engine.url, *args)
    assert done.returncode == code, done.stderr
    assert expected in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_address_where_nobody_listens_is_one_line():
    for command in (["doctor"], ["publish", "--checkpoint", "x", "--version", "v"]):
        done = cli(*command, "--engine", "http://127.0.0.1:9")
        assert done.returncode == 1
        assert "http://127.0.0.1:9: GET /" in done.stderr
        assert "Traceback" not in done.stderr
