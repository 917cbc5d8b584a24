"""Negative control: the same engine and transaction without the hook `retract_flush`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_backend.engine_client import EngineClient, EngineError, EngineRefused
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.transports import DiskTransport
from tests.helpers import DEADLINES, body, difference, load, prompt, versions
from tests.waiting import decoding, endless, landed

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("older_generation")]

SHORT = replace(DEADLINES, flush=2.0)


@pytest.fixture(scope="module")
def bare_engine(tiny_model, tmp_path_factory):
    hooks = [hook for hook in RUN_HOOKS if hook != "retract_flush"]
    local = LocalEngine(
        EngineSettings(model=str(tiny_model), max_total_tokens=40000, hooks=hooks),
        log_path=tmp_path_factory.mktemp("engine") / "engine.log",
    )
    with running_engines([local]):
        yield local


def in_flight(client):
    return endless(client, [prompt(300) for _ in range(3)])


def test_the_flush_is_refused_and_the_engine_stays_at_the_old_version(
    bare_engine, models, sources, tmp_path, run_async
):
    async def scenario():
        async with EngineClient(bare_engine.url, name="engine0", deadlines=SHORT) as client:
            await load(client, sources["a"], tmp_path)
            start = next(versions)
            await client.label(start)
            fleet = Fleet(decide("disjoint", "retract"), start)
            await admit(fleet, client)
            async with in_flight(client) as flying:
                await client.pause("retract")
                with pytest.raises(EngineRefused, match="HTTP 400"):
                    await client.flush()
                await client.resume()
                await decoding(flying)
                with pytest.raises(PublicationError) as failed:
                    await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
                ids = prompt(100)
                answer = await client.generate(body(ids))
                return start, fleet, str(failed.value), ids, answer, await landed(flying)

    start, fleet, message, ids, answer, flown = run_async(scenario(), 120)
    assert "flush not verified (HTTP 400" in message
    assert "hasn't flushed" in message
    assert fleet.version == start
    assert difference(models["a"], ids, answer) < 1e-5
    assert [{s["version"] for s in a["meta_info"]["weight_versions"]} for a in flown] == [{start}] * 3


def test_beside_an_engine_that_flushes_it_is_retired_with_that_reason(bare_engine, sources, tmp_path, run_async):
    """The other engine is a fake one that does as it is told."""

    async def scenario():
        start = next(versions)
        async with (
            FakeEngine(version=start) as other,
            EngineClient(bare_engine.url, name="engine0", deadlines=SHORT) as client,
            EngineClient(other.url, name="other", deadlines=SHORT) as second,
        ):
            await client.label(start)
            fleet = Fleet(decide("disjoint", "retract"), start)
            await admit(fleet, client)
            await admit(fleet, second)
            async with in_flight(client):
                report = await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
            return report, fleet.members["engine0"], fleet.members["other"]

    report, refused, other = run_async(scenario(), 120)
    assert (other.status, refused.status) == ("confirmed", "retired")
    assert "flush not verified (HTTP 400" in refused.reason
    assert list(report.unconfirmed) == ["engine0"]


def test_an_update_that_flushes_by_itself_ends_the_scheduler(bare_engine, sources, tmp_path, run_async):
    """What the hook prevents. The last test of this module: the engine is dead after it."""

    async def scenario():
        sources["b"].save(tmp_path / "weights")
        async with EngineClient(bare_engine.url, deadlines=SHORT) as client, in_flight(client):
            await client.pause("retract")
            with pytest.raises(EngineError):
                await client.call(
                    "POST",
                    "/update_weights_from_disk",
                    body={"model_path": str(tmp_path / "weights"), "flush_cache": True},
                    deadline=20.0,
                )
            with pytest.raises(EngineError):
                await client.reports()

    run_async(scenario(), 180)
    log = bare_engine.log_path.read_text(errors="replace")
    assert "Cache flush failed after updating weights" in log
