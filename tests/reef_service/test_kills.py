"""kill -9 of the gateway under load: all that was acknowledged is there afterwards. REEF_GATEWAY_KILLS=50 for more."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from reef_service.store import LeaseGone, open_store
from reef_service.store.reports import Report
from slime_backend.simulation.fake_engine import FakeEngine
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
                report = {"id": f"r-{receipt}", "score": 1.0, "receipts": [receipt]}
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
                status, batch = await self.client.get(f"/reef/batches?limit=4&lease={lease}")
                if status != 200 or not batch["samples"]:
                    await asyncio.sleep(0.02)
                    continue
                keys = [(s["session"], s["trajectory"]) for s in batch["samples"]]
                self.given[lease] = keys
                if (await self.client.post(f"/reef/batches/{lease}/ack", {}))[0] == 200:
                    self.acked[lease] = keys
            except (OSError, EOFError, ValueError):
                await asyncio.sleep(0.05)


@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost(tmp_path, run_async):
    async def work():
        async with FakeEngine(token_s=0.005) as one, FakeEngine(token_s=0.005) as two:
            gateway = GatewayProcess(tmp_path, [one.url, two.url])
            load = Load(Client(gateway.url))
            tasks = [asyncio.create_task(load.agent(i)) for i in range(16)] + [asyncio.create_task(load.trainer())]
            progress = []
            try:
                for _ in range(KILLS):
                    await asyncio.to_thread(gateway.start)
                    before = len(load.receipts)
                    await until(lambda: len(load.receipts) > before + 16, 60)  # noqa: B023
                    await asyncio.sleep(random.uniform(0.0, 1.0))
                    await asyncio.to_thread(gateway.end, signal.SIGKILL)
                    progress.append(len(load.receipts) - before)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                gateway.end(signal.SIGKILL)
            return load, progress

    load, progress = run_async(work(), 3000)
    assert min(progress) > 16
    assert load.reports
    assert load.acked
    with open_store(f"sqlite:///{tmp_path}/runs/run/gateway.sqlite") as store:
        stored = {record.receipt for record in store.records()}
        assert load.receipts - stored == set()

        async def check():
            for identity, receipt in list(load.reports.items())[-200:]:
                told = await store.add_report(Report(identity, 1.0, receipts=(receipt,)))
                assert told["trajectories"] == 1  # stored before: a new one would be late, or take it again
            for lease in load.acked:
                await store.ack(lease)  # known and acknowledged: told the same again
            for lease in set(load.given) - set(load.acked):
                try:  # its acknowledgement was lost, or not: the lease itself is there, and still its holder's
                    await store.ack(lease)
                except LeaseGone:
                    pytest.fail(f"lease {lease} was given away")

        run_async(check())
    everything = [key for keys in load.acked.values() for key in keys]
    assert len(everything) == len(set(everything)), "a sample was trained on twice"
    print(f"{KILLS} kills: {len(load.receipts)} answers, {len(load.reports)} reports, {len(load.acked)} leases")


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
