"""Publications on a real engine with two tensor ranks: confirmed means both. The publication tests run on it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_backend.engine_client import EngineClient, EngineRefused
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.transports import DiskTransport
from slime_backend.transports.distributed import DistributedTransport
from tests import tensor_parallel
from tests.helpers import DEADLINES, body, difference, fleet_on, load, prompt, versions
from tests.publication_checks import check_retract_publication, check_transport

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass(frozen=True)
class TwoRanks:
    url: str
    failing_while: Path  # while this file exists, tensor rank 1's loads from disk fail


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    failing_while = folder / "failing"
    settings = EngineSettings(
        model=str(tiny_model),
        max_total_tokens=40000,
        hooks=(*RUN_HOOKS, "scope"),
        extra=tensor_parallel.flags(2),
        environment={
            **tensor_parallel.environment(2),
            "FAILING_TENSOR_RANK": "1",
            "FAILING_WHILE": str(failing_while),
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        },
    )
    local = LocalEngine(settings, log_path=folder / "engine.log")
    with running_engines([local]):
        yield TwoRanks(local.url, failing_while)


def test_retract(engine, models, sources, tmp_path, run_async):
    check_retract_publication(engine, models, sources, tmp_path, run_async)


@pytest.mark.parametrize("kind", ["disk", "distributed", "distributed in small buckets"])
def test_each_transport(engine, models, sources, tmp_path, run_async, kind):
    check_transport(engine, models, sources, tmp_path, run_async, kind)


def test_both_ranks_report(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            return await client.reports()

    (report,) = run_async(scenario())
    assert [rank.tensor_rank for rank in report.ranks] == [0, 1]
    assert report.missing_ranks == {}
    assert len({rank.instance_id for rank in report.ranks}) == 2
    assert report.hooks == report.tensor_ranks[0].hooks


@pytest.mark.parametrize("sharing", ["retract", "scoped"])
def test_a_load_that_one_rank_failed_is_not_confirmed_and_the_rank_named(
    engine, models, sources, tmp_path, run_async, sharing
):
    """SGLang alone answers this load with success: see the control below."""

    async def scenario():
        async with fleet_on(engine, decide("disjoint", sharing)) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            engine.failing_while.touch()
            try:
                with pytest.raises(PublicationError) as failed:
                    await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
            finally:
                engine.failing_while.unlink()
            retired = fleet.retired()
            # The ranks hold different weights now; the next load that both carry out mends it.
            await load(client, sources["b"], tmp_path)
            ids = prompt(100)
            return str(failed.value), retired, ids, await client.generate(body(ids))

    message, retired, ids, answer = run_async(scenario(), 120)
    assert "tensor rank 1: no such directory on this node" in message
    assert "no such directory on this node" in retired["engine0"]
    assert difference(models["b"], ids, answer) < 1e-5


def test_negative_control_half_a_load_is_served_as_neither_version(engine, models, sources, tmp_path, run_async):
    """What a confirmation would have stood for: rank 0 has the new weights, rank 1 the old ones."""

    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            await load(client, sources["a"], tmp_path)
            (before,) = await client.reports()
            engine.failing_while.touch()
            try:
                with pytest.raises(EngineRefused, match="tensor rank 1"):
                    await load(client, sources["b"], tmp_path)
            finally:
                engine.failing_while.unlink()
            await client.flush()
            (after,) = await client.reports()
            ids = prompt(100)
            return before, after, ids, await client.generate(body(ids))

    before, after, ids, answer = run_async(scenario(), 120)
    outcomes = [
        (new.loads.done - old.loads.done, new.loads.failed - old.loads.failed) for old, new in pairs(before, after)
    ]
    assert outcomes == [(0, 1), (0, 1)]  # rank 0 counts what it answered
    assert after.loads.last_failure == "tensor rank 1: no such directory on this node"  # it had none of its own
    assert [new.epoch - old.epoch for old, new in pairs(before, after)] == [1, 1]  # an epoch proves nothing of a load
    assert difference(models["a"], ids, answer) > 1e-2
    assert difference(models["b"], ids, answer) > 1e-2


def pairs(before, after):
    return list(zip(before.ranks, after.ranks, strict=True))


def test_a_group_that_is_too_small_for_both_ranks_is_refused_where_it_is_made(
    engine, sources, tmp_path, run_async, monkeypatch
):
    """The negative control of groups with 1 + TP members: a group of two, as for one rank."""
    monkeypatch.setattr(EngineClient, "server_info", lambda self: one_rank())

    async def one_rank():
        return {"tp_size": 1}

    async def scenario():
        async with EngineClient(engine.url, name="engine0", deadlines=DEADLINES) as client:
            mover = DistributedTransport(sources["b"], connect_s=10.0)
            await mover.prepare("x", [client])
            return mover._unjoined

    assert "tensor rank 1: Failed to initialize custom process group" in run_async(scenario(), 60)["engine0"].why
