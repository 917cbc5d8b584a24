"""A paused scheduler sleeps until the next message, and wakes for it: on stand-ins here, on real engines below."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slime_backend.engine_plugin import paused_sleep
from slime_backend.engine_process import DEFAULT_HOOKS, LocalEngine
from slime_backend.wire import ACTIVE
from tests.engine_plugin.engine_api import Api, Endless, Serve
from tests.processes import below_with
from tests.waiting import wait_until

AWAKE_S, DEADLINE_S = 1.0, 30.0  # of CPU that a scheduler which doesn't sleep has used up by the deadline
ASLEEP_S, ASLEEP_SHARE = 3.0, 0.2  # of one core


@pytest.mark.parametrize(
    ("paused", "deferred", "slept"), [(True, [], 1), (True, None, 1), (True, ["a message"], 0), (False, [], 0)]
)
def test_it_sleeps_only_while_paused_with_nothing_put_back(paused: bool, deferred: Any, slept: int) -> None:
    calls: list[int] = []
    scheduler = SimpleNamespace(_engine_paused=paused, maybe_sleep_on_idle=lambda: calls.append(1))
    if deferred is not None:  # SGLang 0.5.15.post1 puts nothing back
        scheduler._deferred_input_requests = deferred
    paused_sleep._after_messages(None, scheduler, [])
    assert len(calls) == slept


def scheduler_of(api: Api) -> psutil.Process:
    port = api.url.rpartition(":")[2]
    servers = below_with(f"--port {port}")  # the guard and the server below it
    (found,) = {child.pid: child for server in servers for child in below_with("scheduler", root=server.pid)}.values()
    return found


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def paused_in_flight(api: Api, mode: str) -> Endless:
    """A request that is paused while it decodes."""
    call = Endless(api, [7] * 50).started()
    assert api.call("/pause_generation", {"mode": mode})[0] == 200
    api.until(lambda report: report.kv.paused, "paused")
    return call


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_engine_leaves_its_core_and_wakes(engine: LocalEngine, mode: str) -> None:
    api = Api(engine.url)
    assert api.report().hooks["paused_sleep"] == ACTIVE
    call = paused_in_flight(api, mode)
    scheduler = scheduler_of(api)
    before = cpu_s(scheduler)
    time.sleep(ASLEEP_S)  # what is measured: a share of this time
    assert cpu_s(scheduler) - before < ASLEEP_SHARE * ASLEEP_S
    assert api.call("/continue_generation", {})[0] == 200
    call.result()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.soak  # an engine more
def test_negative_control_without_the_hook_it_takes_a_core(serve: Serve, tiny_model: Any) -> None:
    with serve(str(tiny_model), hooks=DEFAULT_HOOKS) as api:
        call = paused_in_flight(api, "in_place")
        scheduler = scheduler_of(api)
        before = cpu_s(scheduler)
        # It would sleep where the hook isn't needed any more.
        wait_until(lambda: cpu_s(scheduler) - before >= AWAKE_S, f"{AWAKE_S:g} s of CPU are used up", DEADLINE_S)
        assert api.call("/continue_generation", {})[0] == 200
        call.result()
