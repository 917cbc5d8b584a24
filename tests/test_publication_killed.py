"""`kill -9` of a real scheduler in each phase of a publication.

Two real engines share the work. In each phase the scheduler of one is killed just before the call of that phase is
sent to it; the other must come out of the publication confirmed and running, and every request must come back once,
whole, from weights that its spans name. Then the dead engine is started again, admitted, and reached by the next
publication.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
import pytest

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.dispatch import generate
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import DiskTransport
from slime_backend.wire import REPORTS_PATH
from tests.helpers import body, difference, prompt
from tests.waiting import goes_on

pytestmark = [pytest.mark.engine, pytest.mark.soak]

DEADLINES = Deadlines(pause=20.0, flush=20.0, load=30.0, control=20.0, generate=120.0)
TOKENS = 4000  # of an answer, which must end by itself: an aborted one would be asked for again
PHASES = {
    "look": REPORTS_PATH,
    "pause": "/pause_generation",
    "flush": "/flush_cache",
    "load": "/update_weights_from_disk",
    "label": "/update_weight_version",
    "resume": "/continue_generation",
}


class KillingClient(EngineClient):
    """Kills the engine's scheduler before the next call on `deadly`."""

    deadly = ""
    scheduler: psutil.Process

    async def call(self, method, path, **kwargs):
        if path == self.deadly:
            self.deadly = ""
            os.kill(self.scheduler.pid, signal.SIGKILL)
            await asyncio.to_thread(psutil.wait_procs, [self.scheduler], 10)
        return await super().call(method, path, **kwargs)


def scheduler_of(engine: LocalEngine) -> psutil.Process:
    """The one scheduler process below the engine's guard."""
    found = [p for p in psutil.Process(engine.pid).children(recursive=True) if "scheduler" in p.name()]
    assert len(found) == 1, [p.name() for p in found]
    return found[0]


@pytest.mark.timeout(1500)
def test_a_scheduler_killed_in_each_phase_takes_nobody_with_it(tiny_model, models, sources, tmp_path):
    settings = EngineSettings(model=str(tiny_model), max_total_tokens=40000, hooks=RUN_HOOKS)
    with running_engines([LocalEngine(settings, log_path=tmp_path / "survivor.log")]) as (survivor,):
        asyncio.run(each_phase(survivor, settings, models, sources, tmp_path))


async def each_phase(survivor, settings, models, sources, tmp_path):
    fleet = Fleet(decide("disjoint", "retract"), "v0")
    transports = {"a": DiskTransport(sources["a"], tmp_path), "b": DiskTransport(sources["b"], tmp_path)}
    async with EngineClient(survivor.url, name="survivor", deadlines=DEADLINES) as alive:
        await admit(fleet, alive)
        for number, (phase, path) in enumerate(PHASES.items()):
            with running_engines([LocalEngine(settings, log_path=tmp_path / f"victim-{phase}.log")]) as (victim,):
                async with KillingClient(victim.url, name="victim", deadlines=DEADLINES) as client:
                    # Started with v0, so from the second phase on it only joins: the next publication reaches it.
                    await admit(fleet, client)
                    before, after = f"v{2 * number + 1}", f"v{2 * number + 2}"
                    report = await publish(fleet, transports["a"], before)
                    assert not report.unconfirmed, (phase, report.unconfirmed)
                    client.scheduler = scheduler_of(victim)
                    client.deadly = path
                    await one_phase(fleet, phase, transports["b"], before, after, models)
                    assert await alive.weight_version() == after
                    assert not (await alive.reports())[0].kv.paused


async def one_phase(fleet, phase, transport, before, after, models):
    flying = [asyncio.create_task(generate(fleet, body(prompt(200), TOKENS, 1.0))) for _ in range(4)]
    for member in fleet.routable():
        await goes_on(member.client, 2)
    assert not any(task.done() for task in flying), f"{TOKENS} tokens are too few on this machine"
    report = await publish(fleet, transport, after)
    assert report.state == "resumed", phase
    assert list(report.unconfirmed) == ["victim"], (phase, report.unconfirmed)
    assert report.engines[1].failed_step == phase, report.unconfirmed
    assert [m.name for m in fleet.routable()] == ["survivor"]
    answers = await asyncio.gather(*flying)
    for answer in answers:
        assert answer.engine == "survivor"
        assert len(answer.body["output_ids"]) == TOKENS
        assert {span["version"] for span in answer.body["meta_info"]["weight_versions"]} <= {before, after}
    ids = prompt()
    fresh = await generate(fleet, body(ids))
    assert fresh.body["meta_info"]["cached_tokens"] == 0
    assert difference(models["b"], ids, fresh.body) < 1e-5


@pytest.mark.timeout(900)
def test_an_engine_that_restarts_between_two_publications_is_another_engine(tiny_model, models, sources, tmp_path):
    """The same address, the weights of its start: no answer of it is returned until a publication has confirmed it."""
    settings = EngineSettings(model=str(tiny_model), max_total_tokens=40000, hooks=RUN_HOOKS)
    engines = [LocalEngine(settings, log_path=tmp_path / f"engine{i}.log", name=f"engine{i}") for i in range(2)]
    with running_engines(engines):
        asyncio.run(restarted(engines, settings, models, sources, tmp_path))


async def restarted(engines, settings, models, sources, tmp_path):
    fleet = Fleet(decide("disjoint", "retract"), "v0")
    async with AsyncExitStack() as stack:
        for engine in engines:
            client = EngineClient(engine.url, name=engine.name, deadlines=DEADLINES)
            await admit(fleet, await stack.enter_async_context(client))
        assert not (await publish(fleet, DiskTransport(sources["b"], tmp_path), "v1")).unconfirmed
        port = engines[1].port
        await asyncio.to_thread(engines[1].stop)
        again = LocalEngine(replace(settings, port=port), log_path=tmp_path / "again.log", name="engine1")
        with running_engines([again]):
            assert [m.name for m in fleet.routable()] == ["engine0", "engine1"]  # nobody has looked
            ids = prompt(100)
            answers = await asyncio.gather(*(generate(fleet, body(ids)) for _ in range(6)))
            assert {s["version"] for a in answers for s in a.body["meta_info"]["weight_versions"]} == {"v1"}
            assert max(difference(models["b"], ids, a.body) for a in answers) < 1e-5
            assert sum(a.attempts > 1 for a in answers) > 0, "no request reached the restarted engine"
            assert [m.status for m in fleet.members.values()] == ["confirmed", "joining"]
            report = await publish(fleet, DiskTransport(sources["a"], tmp_path), "v2")
            assert not report.unconfirmed
            assert [m.version for m in fleet.routable()] == ["v2", "v2"]
            answers = await asyncio.gather(*(generate(fleet, body(ids)) for _ in range(6)))
            assert {a.engine for a in answers} == {"engine0", "engine1"}
            assert max(difference(models["a"], ids, a.body) for a in answers) < 1e-5
