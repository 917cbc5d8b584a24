"""The rollout function for slime against a real gateway on fake engines. slime's two classes are stood in for by ones
with the same fields, unless SLIME_SRC names a checkout; its training loop is not run here."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
import sys
import types
from typing import Any

import pytest

from reef_service import slime_rollout
from reef_service.client import BatchClient, GatewayError
from tests.reef_service.harness import gateway_on, scored, until


class StandIn:
    """slime.utils.types.Sample with the fields that are written."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclasses.dataclass
class Output:
    samples: list
    metrics: dict


@pytest.fixture
def slime(monkeypatch):
    monkeypatch.setattr(slime_rollout, "_leases", {})
    for name in ("slime", "slime.utils", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, attribute, value in (
        ("slime.utils.types", "Sample", StandIn),
        ("slime.rollout.base_types", "RolloutFnTrainOutput", Output),
    ):
        module = types.ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)


def arguments(client, save=None, groups=2, size=1):
    return types.SimpleNamespace(
        reef_gateway=client.url, rollout_batch_size=groups, n_samples_per_prompt=size, save=save
    )


def test_a_step_takes_whole_groups_and_acknowledges_the_step_before(tmp_path, run_async, slime):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            for i in range(8):
                await scored(client, i, i / 8, x_reef_group=f"q{i // 2}")
            args = arguments(client, size=2)
            one = await asyncio.to_thread(slime_rollout.generate_rollout, args, 0, None)
            before = (await gateway.store.counts())["trained"]
            two = await asyncio.to_thread(slime_rollout.generate_rollout, args, 1, None)
            return one, before, two, (await gateway.store.counts())["trained"]

    one, before, two, after = run_async(work())
    assert [[s.reward for s in group] for group in one.samples] == [[0.0, 1 / 8], [2 / 8, 3 / 8]]
    assert [[s.group_index for s in g] for g in (*one.samples, *two.samples)] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    sample = one.samples[0][0]
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == 4
    assert sample.weight_versions == ["v0"]
    assert sample.status is StandIn.Status.COMPLETED
    assert one.metrics["reef/class_pure"] == 4
    assert (before, after) == (0, 4)


def test_with_checkpoints_only_what_is_saved_is_acknowledged(tmp_path, run_async, slime):
    """A trainer that dies before its checkpoint gets the same samples again; one that dies after it, others."""
    saves = tmp_path / "ckpt"
    saves.mkdir()

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            for i in range(6):
                await scored(client, i)
            args = arguments(client, save=str(saves))
            rollout = lambda i: asyncio.to_thread(slime_rollout.generate_rollout, args, i, None)  # noqa: E731
            first = await rollout(0)
            slime_rollout._leases.clear()  # it crashed: nothing of it is left in memory
            again = await rollout(0)
            (saves / "latest_checkpointed_iteration.txt").write_text("0")
            other = await rollout(1)
            return first, again, other, (await gateway.store.counts())["trained"]

    first, again, other, trained = run_async(work())
    receipts = [[s.metadata["reef"]["receipts"] for g in out.samples for s in g] for out in (first, again, other)]
    assert receipts[0] == receipts[1]
    assert not {r[0] for r in receipts[0]} & {r[0] for r in receipts[2]}
    assert trained == 2


def test_it_waits_for_agents_and_says_when_nobody_reports(tmp_path, run_async, slime, monkeypatch):
    monkeypatch.setattr(slime_rollout, "WAIT_S", 1.0)

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            await scored(client, 1)
            with pytest.raises(GatewayError, match="not enough scored samples within 1 s; are agents reporting scores"):
                await asyncio.to_thread(slime_rollout.generate_rollout, arguments(client), 0, None)
            monkeypatch.setattr(slime_rollout, "WAIT_S", 60.0)
            asked, once = [], BatchClient._once

            def noted(self, *args):
                asked.append(args)
                return once(self, *args)

            monkeypatch.setattr(BatchClient, "_once", noted)
            waiting = asyncio.create_task(asyncio.to_thread(slime_rollout.generate_rollout, arguments(client), 0, None))
            await until(lambda: len(asked) >= 2)  # it was given too few, and asks again
            await scored(client, 2)
            return await waiting

    assert len(run_async(work()).samples) == 2


def test_a_gateway_that_is_away_is_one_line(monkeypatch):
    monkeypatch.setattr("reef_service.client.TRIES", 1)
    with pytest.raises(GatewayError, match=r"http://127.0.0.1:9/reef/batches: .*refused"):
        BatchClient("http://127.0.0.1:9").next("x", limit=1)


def test_a_trainer_waits_for_a_gateway_that_is_not_up_yet(tmp_path, run_async, slime, monkeypatch):
    """A job may start before its gateway; the control is a deadline that ends before the gateway is there."""
    monkeypatch.setattr("reef_service.client.TRIES", 1)
    away = BatchClient("http://127.0.0.1:9")
    with pytest.raises(GatewayError, match="refused"):
        away.wait("x", bool, deadline_s=0.2, limit=1)
    asked = []

    def once(self, *args):
        asked.append(args)
        if len(asked) <= 20:
            raise GatewayError("refused")
        return {"lease": "x", "ends_at": 0.0, "version": "1", "samples": []}

    monkeypatch.setattr(BatchClient, "_once", once)
    assert away.wait("x", lambda batch: True, deadline_s=30, limit=1).lease == "x"
    assert len({args[1] for args in asked}) == 1  # under one name: what an answer that was lost gave is given again


@pytest.mark.slime
def test_slimes_own_classes_take_it(monkeypatch):
    source = os.environ.get("SLIME_SRC")
    if not source:
        pytest.skip("SLIME_SRC names no slime checkout")
    monkeypatch.syspath_prepend(source)
    sample = slime_rollout.to_slime(
        slime_rollout.Sample("s", 0, "", 1.0, "pure", 0, [1, 2], [3], [1], [-0.5], [], ["r"], "stop"), 0, 0
    )
    assert (sample.tokens, sample.response_length, sample.get_reward_value(types.SimpleNamespace(reward_key=None))) == (
        [1, 2, 3],
        1,
        1.0,
    )
