"""`reef-slime up`: an engine that is killed is logged, started again at its address and admitted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def schedulers(parent: int) -> list[int]:
    """SGLang's processes below `up`: those whose command line has the server's module."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                group = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            ours = f"REEF_TEST_UP={parent}".encode() in environment
            if ours and b"sglang.launch_server" in group and b"engine_guard" not in group:
                found.append(int(entry.name))
    return found


def test_a_killed_engine_is_back(tiny_model, tmp_path):
    mark = os.getpid()
    config = tmp_path / "up.yaml"
    config.write_text("disjoint_prefix_sharing: retract\ngateway: {port: 0, watch_s: 0.5}\n")
    command = [sys.executable, "-m", "slime_backend.cli", "up", str(config), "--json"]
    for setting in (f"model={tiny_model}", "engines=1", f"runs_dir={tmp_path}"):
        command += ["--set", setting]
    log = tmp_path / "up.log"
    environment = {**os.environ, "REEF_TEST_UP": str(mark)}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()[-2000:]
        url = json.loads(line)["gateway"]
        assert ready(url)
        before = schedulers(mark)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not ready(url), "the gateway is not ready", 60)
        wait_until(lambda: ready(url), "the engine is back", 300)
        body = json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 4}}).encode()
        request = urllib.request.Request(url + "/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)["output_ids"]) == 4
        assert not set(before) & set(schedulers(mark))
        text = log.read_text()
        assert "engine0 has ended; the last lines of" in text
        assert "engine0 is started again (1 of 3)" in text
        assert "engine0 is back and was admitted again" in text
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
