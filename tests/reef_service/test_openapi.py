"""Schemathesis over the OpenAPI document: whatever is sent, the gateway doesn't fail. REEF_API_CASES=600, with every
boundary of every schema besides, is some 8,000 cases; REEF_API_SEED for others."""

from __future__ import annotations

import asyncio
import os
import re
import sys

import pytest

from tests.reef_service.harness import gateway_on

CASES = int(os.environ.get("REEF_API_CASES", "10"))
SEED = os.environ.get("REEF_API_SEED", "1")
PHASES = "coverage,fuzzing" if "REEF_API_CASES" in os.environ else "fuzzing"


@pytest.mark.timeout(3600)
def test_no_request_makes_the_gateway_fail(tmp_path, run_async):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed; pip install 'reef-slime[dev]'")

    async def work():
        async with gateway_on(tmp_path, "yes", config={"watch_s": 60}, token_s=0.0005) as (client, gateway, _):
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{client.url}/openapi.json", "--no-color"]
            command += ["--checks", "not_a_server_error", "--phases", PHASES, "--seed", SEED]
            command += ["--max-examples", str(CASES), "--exclude-path", "/reef/events", "--request-timeout", "60"]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            output, _ = await process.communicate()
            healthy = await client.get("/healthz")
            return process.returncode, output.decode(), healthy, await gateway.store.counts()

    code, output, healthy, counts = run_async(work(), 3000)
    assert code == 0, output[-6000:]
    assert healthy == (200, {"status": "ok"})
    generated = sum(int(n) for n in re.findall(r"(\d+) generated", output))
    print(f"{generated} cases, {counts['states']}")
    assert generated > 100
    assert counts["states"].get("complete", 0) > 0, "no request got through: the test shows nothing"
