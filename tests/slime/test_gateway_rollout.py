"""A slime job whose samples come from agents: a gateway stands in front of the job's own engine, agents ask it and
report scores, and `reef_service.slime_rollout` hands the trajectories to slime's trainer.

Agents ask under versions 1 and 2. The first two rollouts are of the trainer's version; the control is the third, which
is one version behind, and the trainer's own measure shows it.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from slime_backend.engine_client import EngineClient, EngineError
from tests.slime.jobs import JOB, job_flags, run_job

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, SIZE = int(JOB["--rollout-batch-size"]), int(JOB["--n-samples-per-prompt"])
SAME_WEIGHTS = 1e-3
ENGINE = re.compile(r"Ports for engine 0: \{'host': '([^']+)', 'port': (\d+)")


async def engine_at(log, job):
    """The address of the job's engine, once the job has said it."""
    while not job.done():
        found = ENGINE.search(log.read_text(errors="replace")) if log.is_file() else None
        if found:
            return f"http://{found[1]}:{found[2]}"
        await asyncio.sleep(0.5)
    raise AssertionError(job.result().tail())


async def wait_for_version(url, version, job):
    async with EngineClient(url) as client:
        while not job.done():
            try:
                if await client.weight_version() == version:
                    return
            except EngineError:  # not up yet
                pass
            await asyncio.sleep(0.2)
    raise AssertionError(job.result().tail())


async def one_answer(client, group, number):
    """An agent's turn with its score; its receipt."""
    body = {"messages": [{"role": "user", "content": f"{group}: count"}], "max_tokens": 16}
    status, answer = await client.post("/v1/chat/completions", body, x_reef_group=group)
    assert status == 200, answer
    receipt = answer["reef"]["receipt"]
    report = {"id": f"score-{receipt}", "score": float(number), "receipts": [receipt]}
    status, told = await client.post("/reef/report", report)
    assert (status, told["trajectories"]) == (200, 1)
    return receipt


async def groups(client, names):
    return await asyncio.gather(*(one_answer(client, name, i) for name in names for i in range(SIZE)))


@pytest.fixture(scope="module")
def run(tiny_flags, tmp_path_factory):
    """(the job, receipts by the version that agents asked under, the gateway's run directory)."""
    from tests.reef_service.gateway_process import GatewayProcess
    from tests.reef_service.harness import Client

    directory = tmp_path_factory.mktemp("gateway-rollout")
    gateway = GatewayProcess(directory / "gateway", [], f"model={tiny_flags[1]}")
    flags = [
        *("--num-rollout", "3", "--disjoint-prefix-sharing", "--reef-run-dir", f"{directory}/reef"),
        *("--reef-save-weights", "--reef-gateway", gateway.url),
        *("--rollout-function-path", "reef_service.slime_rollout.generate_rollout"),
    ]

    async def work():
        job = asyncio.create_task(
            asyncio.to_thread(
                run_job, "slime_backend.slime_hooks.train", job_flags(tiny_flags, directory, flags), directory
            )
        )
        asked = {}
        try:
            url = await engine_at(directory / "job.log", job)
            await wait_for_version(url, "1", job)
            gateway.engines(url)
            await asyncio.to_thread(gateway.start)
            client = Client(gateway.url)
            asked["1"] = await groups(client, [f"one-{i}" for i in range(GROUPS)])
            await wait_for_version(url, "2", job)
            asked["2"] = await groups(client, [f"two-{i}" for i in range(2 * GROUPS)])
            return await job, asked, (await client.get("/reef/state"))[1]["store"]
        finally:
            gateway.end()
            await asyncio.wait([job])

    done, asked, store = asyncio.run(work())
    assert done.returncode == 0, done.tail()
    return done, asked, store, gateway.run_directory


def test_what_agents_did_is_trained_on_once(run):
    done, asked, store, _ = run
    trained = [
        receipt for i in range(3) for sample in done.samples(i) for receipt in sample["metadata"]["reef"]["receipts"]
    ]
    assert sorted(trained) == sorted([*asked["1"], *asked["2"]])
    assert store["trained"] == 2 * GROUPS * SIZE  # a step's samples are acknowledged at the next step


def test_versions_are_true(run):
    done, _, _, _ = run
    for rollout_id, version in enumerate(("1", "2", "2")):
        assert done.versions(rollout_id) == [[version]] * GROUPS * SIZE
    first, second, behind = done.logprob_diffs
    assert max(first, second) < SAME_WEIGHTS
    assert behind > SAME_WEIGHTS


def test_the_audit_of_the_gateway_s_record_finds_nothing_and_would_have(run):
    from slime_backend.audit.audit import audit_run
    from slime_backend.cli.gateway import export
    from slime_backend.simulation.models import load_model

    done, asked, _, gateway_run = run
    published = done.directory / "reef" / "weights"
    weights = gateway_run / "weights"
    weights.mkdir(exist_ok=True)
    for version in ("1", "2"):
        (weights / version).unlink(missing_ok=True)  # the gateway links what it was started with
        (weights / version).symlink_to(published / version, target_is_directory=True)
    export(gateway_run, None)
    result = audit_run(gateway_run, load_model)
    assert (result.rollouts, [str(v) for v in result.violations]) == (3 * GROUPS * SIZE, [])
    (weights / "2").unlink()
    (weights / "2").symlink_to(published / "1", target_is_directory=True)
    assert len(audit_run(gateway_run, load_model).violations) == len(asked["2"])
