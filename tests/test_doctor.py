"""What `reef-slime doctor` says of an engine that is slow or refuses its probes (real ones: test_doctor_engine.py)."""

from __future__ import annotations

from typing import Any

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import doctor
from slime_backend.simulation.fake_engine import FakeEngine


def test_a_slow_engine_is_unknown_and_left_running(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENDS_S", 0.3)

    async def scenario() -> tuple[doctor.Finding, bool]:
        async with FakeEngine(token_s=0.05) as engine, EngineClient(engine.url) as client:
            return await doctor._try(client, "retract pause", "", doctor._retract_pause), engine.paused

    finding, paused = run_async(scenario())
    assert finding.verdict == "unknown"
    assert finding.seen.startswith("a request of 2000 tokens didn't end within 0.3 s")
    assert not paused


def test_a_probe_that_is_refused_says_what_the_engine_said(run_async: Any) -> None:
    async def scenario() -> doctor.Finding:
        async with FakeEngine() as engine, EngineClient(engine.url) as client:
            engine.faults["/generate"] = ["refuse"]
            return await doctor._try(client, "retract pause", "", doctor._retract_pause)

    finding = run_async(scenario())
    assert finding.verdict == "does not hold"
    assert "/generate refused" in finding.seen


@pytest.mark.parametrize("check", [doctor._retract_pause, doctor._in_place_pause])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_pause_that_does_nothing_does_not_hold(
    run_async: Any, monkeypatch: pytest.MonkeyPatch, check: Any, ignored: bool
) -> None:
    """The engine answers 200, reports itself paused and goes on sampling; one that pauses holds."""
    monkeypatch.setattr(doctor, "SETTLES_S", 0.6)
    monkeypatch.setattr(doctor, "LONG", 1000)

    async def scenario() -> doctor.Finding:
        async with FakeEngine(token_s=0.005) as engine, EngineClient(engine.url) as client:
            engine.ranks[0].ignores_pause = ignored
            return await doctor._try(client, "pause", "", check)

    finding = run_async(scenario())
    assert finding.verdict == ("does not hold" if ignored else "holds"), finding
    assert ("went on while paused" in finding.seen) is ignored


def test_a_pause_whose_answer_is_a_lie_does_not_hold(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SETTLES_S", 0.6)

    async def scenario() -> doctor.Finding:
        async with FakeEngine(token_s=0.005) as engine, EngineClient(engine.url) as client:
            engine.faults["/pause_generation"] = ["lie"]
            return await doctor._try(client, "pause", "", doctor._in_place_pause)

    assert run_async(scenario()).verdict == "does not hold"
