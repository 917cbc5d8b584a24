"""Publications in quick succession under streaming clients: nobody sees an error, and every span is true.

The fake engines say in `truth` which weights were really in memory for each token. REEF_GATEWAY_SECONDS=300 and
REEF_GATEWAY_CLIENTS=64 for the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter

import pytest

from slime_backend.engine_client import Deadlines
from tests.reef_service.harness import gateway_on
from tests.reef_service.test_faults import checkpoint

SECONDS = float(os.environ.get("REEF_GATEWAY_SECONDS", "3"))
CLIENTS = int(os.environ.get("REEF_GATEWAY_CLIENTS", "16"))
EVERY_S = 2.0 if SECONDS > 10 else 0.7
TOKEN_S = 0.02 if CLIENTS <= 16 else 0.1  # all of it runs in this one process


async def stream_without_end(client, number, until, seen):
    turn = 0
    while time.monotonic() < until:
        turn += 1
        body = {"input_ids": [number + 1, turn % 200, 3], "stream": True, "sampling_params": {"max_new_tokens": 60}}
        reader, writer = await client.send("POST", "/generate", body, x_reef_session=f"c{number}-{turn}")
        raw = (await reader.read()).decode()
        writer.close()
        data = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        if " 200 " not in raw.split("\r\n", 1)[0] + " " or not data or data[-1] != "[DONE]":
            seen["errors"].append(raw[-300:])
            continue
        meta = json.loads(data[-2])["meta_info"]
        seen["answers"] += 1
        seen["classes"][meta["reef"]["class"]] += 1
        if meta["weight_versions"] != meta["truth"] or meta["completion_tokens"] != 60:
            seen["errors"].append(str(meta))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sharing", ["retract", "scoped"])
def test_no_client_sees_an_error(tmp_path, run_async, sharing):
    seen = {"errors": [], "answers": 0, "classes": Counter()}

    async def work():
        async with gateway_on(tmp_path, sharing=sharing, token_s=TOKEN_S, deadlines=Deadlines()) as (
            client,
            gateway,
            _,
        ):
            until = time.monotonic() + SECONDS
            clients = [asyncio.create_task(stream_without_end(client, i, until, seen)) for i in range(CLIENTS)]
            versions = 0
            while time.monotonic() < until:
                versions += 1
                body = {"version": f"v{versions}", "checkpoint": checkpoint(tmp_path, f"v{versions}")}
                status, report = await client.post("/reef/publications", body)
                assert (status, report["unconfirmed"]) == (200, {}), report
                await asyncio.sleep(EVERY_S)
            await asyncio.gather(*clients)
            return versions, await gateway.store.counts(), gateway.plane.gate.refused

    versions, counts, refused = run_async(work(), 600)
    print(f"{versions} publications, {seen['answers']} answers, {dict(seen['classes'])}, {refused} refused")
    assert seen["errors"] == []
    assert counts["states"] == {"complete": seen["answers"]}
    assert versions >= 2
    assert set(seen["classes"]) - {"pure"}, "no request lived through a publication: the test shows nothing"
