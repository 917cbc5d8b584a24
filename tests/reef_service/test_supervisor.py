"""Engines of `up` that end: what is logged, and how often they are started again. Their processes are stand-ins."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from reef_service import supervisor
from reef_service.supervisor import Supervisor, last_lines
from slime_backend.engine_process import EngineSettings, EngineStartError, LocalEngine
from slime_backend.fleet import Fleet, Member
from slime_backend.policy import decide
from tests.waiting import until


class Process(LocalEngine):
    """A LocalEngine whose process is a flag."""

    def __init__(self, tmp_path, *, fails=False):
        super().__init__(EngineSettings(model="m"), log_path=tmp_path / "engine0.log", name="engine0")
        self.runs, self.fails, self.starts = True, fails, []
        self.port = 21234
        self.log_path.write_text("first\nTypeError: value cannot be converted\n\n")

    def alive(self):
        return self.runs

    def start(self):
        self.starts.append(self.settings.port)
        self.log_path.write_text(f"start {len(self.starts)}\n")
        self.runs = True

    def wait_ready(self, deadline_s=300.0):
        if self.fails:
            self.runs = False
            raise EngineStartError("it ended while starting")

    def stop(self):
        self.runs = False


class Named:
    name = url = "engine0"


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(supervisor, "LOOK_S", 0.001)
    fleet = Fleet(decide("disjoint", "retract"), "v0")
    engine: Any = Named()
    fleet.add(Member(engine))
    fleet.confirm(fleet.members["engine0"], "v0")
    return fleet


def test_an_engine_that_ends_is_logged_retired_and_started_again(run_async, tmp_path, fleet, caplog):
    engine = Process(tmp_path)
    gone = fleet.members["engine0"].gone

    async def work():
        task = asyncio.create_task(Supervisor(fleet, [engine], 1.0).run())
        engine.runs = False
        await until(lambda: engine.starts, "the engine is started again")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run_async(work())
    assert engine.starts == [21234]  # at the same address
    assert "TypeError: value cannot be converted" in caplog.text
    assert "engine0 is retired: its process has ended" in caplog.text
    assert gone.end is not None
    assert (tmp_path / "engine0.log.1").read_text().startswith("first")


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_ends_again_and_again_is_given_up(run_async, tmp_path, fleet, caplog, fails):
    engine = Process(tmp_path, fails=fails)

    async def work():
        task = asyncio.create_task(Supervisor(fleet, [engine], 1.0, restarts=2).run())
        engine.runs = False
        if not fails:
            for number in (1, 2):
                await until(lambda: len(engine.starts) == number and engine.runs, "it runs")  # noqa: B023
                engine.runs = False
        await asyncio.wait_for(task, 30)

    run_async(work())
    assert len(engine.starts) == 2
    assert "is not started again" in caplog.text


def test_the_last_lines_of_a_long_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(100_000)) + "\n\n")
    assert last_lines(log, 2) == ["line 99998", "line 99999"]
    assert "no log" in last_lines(tmp_path / "none")[0]
