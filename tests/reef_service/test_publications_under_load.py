"""Publications in quick succession under streaming clients: nobody sees an error, and every span is true.

Engines and gateway have processes of their own, as in life; this one asks and publishes, by the clock. The fake engines
record in `truth` which weights were really in memory for each token; of the real one, every answer is recomputed.
REEF_GATEWAY_SECONDS=300 and REEF_GATEWAY_CLIENTS=64 for the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter

import pytest

from slime_backend.simulation.fleet_process import fake_engines
from tests.reef_service.gateway_process import GatewayProcess
from tests.reef_service.harness import Client, checkpoint

SECONDS = float(os.environ.get("REEF_GATEWAY_SECONDS", "3"))
CLIENTS = int(os.environ.get("REEF_GATEWAY_CLIENTS", "16"))
EVERY_S = 2.0 if SECONDS > 10 else 0.7
TOKENS, TOKEN_S = 60, 0.02 if CLIENTS <= 16 else 0.1


class Seen:
    """What clients and publisher saw."""

    def __init__(self) -> None:
        self.errors, self.answers, self.classes = [], 0, Counter()
        self.took_s, self.late, self.refused, self.states = [], 0, 0, {}

    def __str__(self) -> str:
        took = sorted(self.took_s)
        return (
            f"{len(took)} publications in {SECONDS:g} s, {self.late} begun late; {1000 * took[len(took) // 2]:.0f} ms "
            f"the middle one, {1000 * took[-1]:.0f} ms the longest; {self.answers} answers, {dict(self.classes)}, "
            f"{self.refused} refused, {len(self.errors)} errors"
        )

    def check(self) -> None:
        assert self.errors == []
        assert self.states == {"complete": self.answers}
        assert len(self.took_s) >= 2
        assert set(self.classes) - {"pure"}, "no request lived through a publication: the test shows nothing"


async def stream_without_end(client, number, until, seen):
    turn = 0
    while time.monotonic() < until:
        turn += 1
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": [number + 1, turn % 200, 3], "stream": True, "sampling_params": sampling}
        reader, writer = await client.send("POST", "/generate", body, x_reef_session=f"c{number}-{turn}")
        raw = (await reader.read()).decode()
        writer.close()
        data = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
        if " 200 " not in raw.split("\r\n", 1)[0] + " " or not data or data[-1] != "[DONE]":
            seen.errors.append(raw[-300:])
            continue
        meta = json.loads(data[-2])["meta_info"]
        seen.answers += 1
        seen.classes[meta["reef"]["class"]] += 1
        spans = meta["weight_versions"]
        if spans != meta.get("truth", spans) or meta["completion_tokens"] != TOKENS:
            seen.errors.append(str(meta))


async def publish_by_the_clock(client, until, make_checkpoint, seen):
    """One every EVERY_S, or at once where the one before took longer."""
    due = time.monotonic()
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        begun = time.monotonic()
        version = f"v{len(seen.took_s) + 1}"
        body = {"version": version, "checkpoint": make_checkpoint(version)}
        status, report = await client.post("/reef/publications", body)
        assert (status, report["state"], report["unconfirmed"]) == (200, "resumed", {}), report
        seen.took_s.append(time.monotonic() - begun)
        seen.late += begun - due > 0.1
        due = max(due + EVERY_S, time.monotonic())


async def clients_and_publications(url, make_checkpoint):
    client, seen = Client(url), Seen()
    until = time.monotonic() + SECONDS
    clients = [asyncio.create_task(stream_without_end(client, i, until, seen)) for i in range(CLIENTS)]
    await publish_by_the_clock(client, until, make_checkpoint, seen)
    await asyncio.gather(*clients)
    _, state = await client.get("/reef/state")
    seen.refused, seen.states = state["gate"]["refused"], state["store"]["states"]
    print(seen)
    return seen


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sharing", ["retract", "scoped"])
def test_no_client_sees_an_error(tmp_path, run_async, sharing):
    with fake_engines(2, token_s=TOKEN_S, incremental=True) as urls:
        gateway = GatewayProcess(tmp_path, urls, f"disjoint_prefix_sharing={sharing}")
        gateway.start()
        try:
            work = clients_and_publications(gateway.url, lambda version: checkpoint(tmp_path, version))
            seen = run_async(work, SECONDS + 300)
        finally:
            gateway.end()
    seen.check()


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_on_a_real_engine_every_receipt_holds_under_audit(tmp_path, run_async, tiny_model, tiny_model_b):
    """In turn the weights of two models, each time under a new name; afterwards every answer is recomputed."""
    from slime_backend.audit.audit import audit_run
    from slime_backend.cli.gateway import export
    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
    from slime_backend.simulation.models import load_model

    flags = ("--incremental-streaming-output", "--max-running-requests", str(CLIENTS))
    hooks = (*RUN_HOOKS, "scope")
    settings = EngineSettings(model=str(tiny_model), max_total_tokens=40000, hooks=hooks, extra=flags)
    engine = LocalEngine(settings, log_path=tmp_path / "engine.log")
    with running_engines([engine]):
        gateway = GatewayProcess(tmp_path, [engine.url], f"model={tiny_model}", "disjoint_prefix_sharing=scoped")
        gateway.start()
        try:
            weights = [str(tiny_model), str(tiny_model_b)]
            work = clients_and_publications(gateway.url, lambda version: weights[int(version[1:]) % 2])
            seen = run_async(work, SECONDS + 300)
        finally:
            gateway.end()
    seen.check()
    export(gateway.run_directory, None)
    audit = audit_run(gateway.run_directory, load_model)
    print(
        f"audit: {audit.rollouts} rollouts, {audit.tokens} tokens, largest difference {audit.max_abs_logprob_diff:.2g}"
    )
    assert audit.rollouts == seen.answers
    assert [str(v) for v in audit.violations] == []
