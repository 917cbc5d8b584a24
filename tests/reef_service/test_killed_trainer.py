"""A trainer is killed between any two of its steps and started again: each sample is in its checkpoint once.

The trainer is a process (killed_trainer.py) with slime's loop. All leases are over by the time that it is back. The
control takes leases as they were taken when only the process knew of them: it trains on samples twice.
"""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from sqlalchemy import update

from reef_service.slime_job import TRACKER
from reef_service.store.schema import leases, trajectories
from tests.reef_service.harness import gateway_on, scored
from tests.reef_service.killed_trainer import GROUPS

STEPS = 4
POINTS = [f"{step}:{point}" for step in (1, 2) for point in ("taken", "trained", "saved", "acknowledged")]


async def trainer(url, save, *options):
    """The exit code of a trainer."""
    command = [sys.executable, "-m", "tests.reef_service.killed_trainer", url, str(save), str(STEPS), *options]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode in (0, -9), errors.decode()
    return process.returncode


def checkpoint(save):
    return json.loads((save / f"{(save / TRACKER).read_text()}.json").read_text())


async def end_leases(store):
    """As hours later."""

    def end(connection):
        connection.execute(update(trajectories).where(trajectories.c.lease_ends.is_not(None)).values(lease_ends=1.0))
        connection.execute(update(leases).values(ends_at=1.0))

    await store.writer.write(end)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("loop", ["", "--asynchronous"])
@pytest.mark.timeout(600)
def test_each_sample_is_trained_on_once_wherever_the_trainer_is_killed(tmp_path, run_async, interval, loop):
    async def work():
        killed = 0
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            for point in POINTS:
                save = tmp_path / point.replace(":", "-") / "ckpt"
                receipts = {await scored(client, f"{point}-{i}") for i in range(STEPS * GROUPS)}
                options = ("--interval", str(interval), *([loop] if loop else ()))
                code = await trainer(client.url, save, *options, "--kill", point)
                killed += code == -9
                if code:
                    await end_leases(gateway.store)
                    assert await trainer(client.url, save, *options) == 0
                trained = checkpoint(save)
                assert sorted(trained) == sorted(receipts), point
                counts = await gateway.store.counts()
                assert counts["trained"] == counts["scored"], point  # the last steps' are acknowledged as well
        return killed

    # Where it saves at every second step there is one "saved" less.
    assert run_async(work(), 500) >= len(POINTS) - 1


@pytest.mark.timeout(300)
def test_control_names_in_memory_train_on_samples_twice(tmp_path, run_async):
    save = tmp_path / "ckpt"

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            for i in range((STEPS + 1) * GROUPS):
                await scored(client, i)
            assert await trainer(client.url, save, "--old", "--kill", "1:saved") == -9
            await end_leases(gateway.store)
            assert await trainer(client.url, save, "--old") == 0
            return checkpoint(save)

    trained = run_async(work(), 250)
    assert len(trained) > len(set(trained))


@pytest.mark.timeout(300)
def test_jobs_whose_directories_are_called_alike_share_nothing(tmp_path, run_async):
    saves = [tmp_path / name / "ckpt" for name in "ab"]

    async def work(*options):
        async with gateway_on(tmp_path / f"gateway{len(options)}", "yes") as (client, _, _):
            receipts = {await scored(client, i) for i in range(2 * STEPS * GROUPS)}
            # Both are in the middle of the same step when the other one takes its samples.
            for save in saves:
                assert await trainer(client.url, save, *options, "--kill", "0:taken") == -9
            for save in saves:
                assert await trainer(client.url, save, *options) == 0
            return receipts, [checkpoint(save) for save in saves]

    receipts, (one, two) = run_async(work(), 250)
    assert sorted([*one, *two]) == sorted(receipts)
    for save in saves:
        (save / TRACKER).unlink()
    _, (one, two) = run_async(work("--old"), 250)  # the control: the same samples under one name
    assert set(one) & set(two)


def test_a_job_over_http(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for i in range(4):
                await scored(client, i)
            ask = {"job": "one", "step": 0, "limit": 2, "at_least": 2}
            _, first = await client.post("/reef/batches", ask)
            _, again = await client.post("/reef/batches", ask)
            assert again["lease"] == first["lease"] == "one:0"
            assert [s["receipts"] for s in again["samples"]] == [s["receipts"] for s in first["samples"]]
            _, nothing = await client.post("/reef/batches", {"limit": 3, "at_least": 3})
            assert (nothing["lease"], nothing["samples"]) == (None, [])
            assert (await client.post("/reef/batches/one:0/ack", {"job": "two"}))[0] == 409
            assert (await client.post("/reef/batches/one:0/release", {"job": "two"}))[0] == 409
            assert (await client.post("/reef/batches", {"lease": "one:0"}))[0] == 409
            wrong = [await client.post("/reef/batches", body) for body in ({"step": 1}, {**ask, "lease": "x"})]
            assert [status for status, _ in wrong] == [400, 400]
            assert (await client.get("/reef/jobs/one/leases"))[1]["leases"][0]["step"] == 0
            saved = [await client.post("/reef/jobs/one/saved", {"step": 0, "lease_s": 60}) for _ in range(2)]
            return saved, await client.get("/reef/jobs/one/leases")

    (first, again), left = run_async(work())
    assert first == (200, {"acknowledged": ["one:0"], "trained": 2, "gone": [], "held": []})
    assert again[1]["trained"] == 0
    assert left[1]["leases"] == []
