"""kill -9 of the gateway under load: all that was acknowledged is there afterwards. REEF_GATEWAY_KILLS=50 for more."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from reef_service.store import LeaseGone, open_store, schema
from reef_service.store.reports import Report
from slime_backend.simulation.fake_engine import FakeEngine
from tests.reef_service.examples import turn
from tests.reef_service.gateway_process import GatewayProcess
from tests.reef_service.harness import Client, until

KILLS = int(os.environ.get("REEF_GATEWAY_KILLS", "1"))


class Load:
    """Agents and a trainer that write down what was acknowledged to them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.receipts: set[str] = set()
        self.reports: dict[str, str] = {}  # id -> receipt
        self.acked: dict[str, list[tuple[str, int]]] = {}  # lease -> its samples
        self.given: dict[str, list[tuple[str, int]]] = {}
        self.trained: list[tuple[str, int]] = []

    async def agent(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            body = {"messages": [{"role": "user", "content": f"{number} {turn}"}], "max_tokens": 8}
            try:
                status, answer = await self.client.post(
                    "/v1/chat/completions", body, x_reef_session=f"a{number}-{turn}"
                )
                if status != 200:
                    continue
                receipt = answer["reef"]["receipt"]
                self.receipts.add(receipt)
                report: dict[str, Any] = {"id": f"r-{receipt}", "score": 1.0, "receipts": [receipt]}
                if (await self.client.post("/reef/report", report))[0] == 200:
                    self.reports[report["id"]] = receipt
            except (OSError, EOFError, ValueError):  # the gateway is dead: nothing was acknowledged
                await asyncio.sleep(0.05)

    async def trainer(self) -> None:
        step = 0
        while True:
            step += 1
            lease = f"step-{step}-{random.random()}"
            try:
                status, batch = await self.client.post("/reef/batches", {"limit": 4, "lease": lease, "lease_s": 86400})
                if status != 200 or not batch["samples"]:
                    await asyncio.sleep(0.02)
                    continue
                keys = [(s["session"], s["trajectory"]) for s in batch["samples"]]
                self.given[lease] = keys
                if (await self.client.post(f"/reef/batches/{lease}/ack", {}))[0] == 200:
                    self.acked[lease] = keys
            except (OSError, EOFError, ValueError):
                await asyncio.sleep(0.05)


def store_of(directory):
    return open_store(f"sqlite:///{directory}/runs/run/gateway.sqlite")


def look_up(load: Load, directory: Path) -> int:
    """Check that every acknowledged answer, report and lease is in the store as it was answered; return how many."""

    def rows(connection):
        found = (
            {row.receipt for row in connection.execute(select(schema.turns.c.receipt))},
            {row.id: json.loads(row.body) for row in connection.execute(select(schema.reports))},
            {row.id: row for row in connection.execute(select(schema.leases))},
            {
                (row.session, row.number): row
                for row in connection.execute(
                    select(schema.trajectories).where(schema.trajectories.c.lease.is_not(None))
                )
            },
        )
        return found

    receipts, given, acked, wanted = set(load.receipts), dict(load.given), dict(load.acked), dict(load.reports)
    with store_of(directory) as store:
        turns, reports, leases, leased = asyncio.run(store.read(rows))
    assert receipts - turns == set()
    for identity, receipt in wanted.items():
        assert (reports.get(identity) or {}).get("receipts") == [receipt], identity
        assert reports[identity]["score"] == 1.0
    for lease, samples in given.items():
        assert lease in leases, lease
        assert [tuple(key) for key in json.loads(leases[lease].samples)] == samples
        assert {leased[key].lease for key in samples} == {lease}
    for lease, samples in acked.items():
        assert leases[lease].acked_at is not None
        assert all(leased[key].trained_at is not None for key in samples)
    return len(receipts) + len(wanted) + len(given) + len(acked)


@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost(tmp_path, run_async):
    async def work():
        async with FakeEngine(token_s=0.005) as one, FakeEngine(token_s=0.005) as two:
            gateway = GatewayProcess(tmp_path, [one.url, two.url])
            load = Load(Client(gateway.url))
            tasks = [asyncio.create_task(load.agent(i)) for i in range(16)] + [asyncio.create_task(load.trainer())]
            progress = []
            looked_up = 0
            try:
                for _ in range(KILLS):
                    await asyncio.to_thread(gateway.start)
                    before = len(load.receipts)
                    await until(lambda: len(load.receipts) > before + 16, 60)  # noqa: B023
                    await asyncio.sleep(random.uniform(0.0, 1.0))
                    await asyncio.to_thread(gateway.end, signal.SIGKILL)
                    progress.append(len(load.receipts) - before)
                    looked_up += await asyncio.to_thread(look_up, load, tmp_path)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                gateway.end(signal.SIGKILL)
            return load, progress, looked_up

    load, progress, looked_up = run_async(work(), 3000)
    assert min(progress) > 16
    assert load.reports
    assert load.acked
    with store_of(tmp_path) as store:

        async def retry():
            for identity, receipt in load.reports.items():  # answered the same again, through all layers
                answered = await store.add_report(Report(identity, 1.0, receipts=(receipt,)))
                assert answered == {"id": identity, "trajectories": 1, "late": []}
            for lease, samples in load.given.items():
                try:  # acknowledged or not, it is there, and still its holder's
                    assert await store.ack(lease) == len(samples)
                except LeaseGone:
                    pytest.fail(f"lease {lease} was given away")

        run_async(retry(), 300)
    everything = [key for keys in load.acked.values() for key in keys]
    assert len(everything) == len(set(everything)), "a sample was trained on twice"
    print(
        f"{KILLS} kills: {len(load.receipts)} answers, {len(load.reports)} reports, {len(load.given)} leases, "
        f"{len(load.acked)} of them acknowledged; {looked_up} look-ups after kills"
    )


def test_the_look_up_finds_what_is_missing(tmp_path, run_async):
    load = Load(Client("http://127.0.0.1:9"))
    with store_of(tmp_path) as store:
        run_async(store.add_turn(turn("there")))
    load.receipts = {"there"}
    assert look_up(load, tmp_path) == 1
    for missing in ({"receipts": {"there", "lost"}}, {"reports": {"r-there": "there"}}, {"given": {"l": [("s", 0)]}}):
        other = Load(load.client)
        vars(other).update(missing)
        with pytest.raises(AssertionError):
            look_up(other, tmp_path)


def test_a_gateway_that_is_told_to_stop_stops(tmp_path, run_async):
    async def work():
        async with FakeEngine() as engine:
            gateway = GatewayProcess(tmp_path, [engine.url])
            await asyncio.to_thread(gateway.start)
            reader, _ = await Client(gateway.url).send("GET", "/reef/events")  # a page that is open
            await reader.readline()
            return await asyncio.to_thread(gateway.end, signal.SIGTERM), (tmp_path / "gateway.log").read_text()

    code, log = run_async(work())
    assert code == 130
    assert "Traceback" not in log
    assert "ERROR" not in log
