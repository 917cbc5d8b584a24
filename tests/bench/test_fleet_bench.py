"""`reef-slime bench fleet` measured end to end, with fewer and faster fake engines. No time is looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_backend.bench import clients, fleet
from slime_backend.bench.fleet import KINDS, Outcome, Times, growth_rows, time_fault, time_growth
from slime_backend.bench.rows import BenchError, Row
from slime_backend.simulation.fleet_process import fake_engines
from tests.processes import wait_gone

KIND = {kind.name: kind for kind in KINDS}


def test_a_fleet_with_an_engine_that_lies_is_not_timed(run_async: Any) -> None:
    with (
        fake_engines(1) as honest,
        fake_engines(1, faults={"/update_weight_version": ["lie"]}) as lying,
        pytest.raises(BenchError, match="its label reads 'v0'"),
    ):
        run_async(time_growth({2: [*honest, *lying]}, rounds=1))


@pytest.mark.parametrize(("times", "holds"), [(1.9, True), (2.1, False)])
def test_the_goal_of_the_barrier(times: float, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TWICE", 4)

    def took(ms: float) -> Times:
        return Times([ms] * 3, [ms + 1] * 3, [1.0] * 3, [1.0] * 3)

    found = {(size, way): took(10.0 if size == 1 else 10 * times) for size in (1, 4) for way in fleet.WAYS}
    (row,) = (r for r in growth_rows(found) if "beside 4" in r.case)
    assert row.holds is holds


@pytest.mark.parametrize("way", fleet.WAYS)
@pytest.mark.parametrize("name", ["well", "dead", "hung"])
def test_the_others_resume_whatever_is_wrong_with_one(
    name: str, way: Any, run_async: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "DEADLINE_S", 0.5)
    what = KIND[name]
    with fake_engines(2) as healthy, fake_engines(2, faults=what.faults) as patients:
        found = run_async(time_fault(healthy, patients, what, way, "tag"))
        assert found.as_expected
        assert len(found.others_ms) == len(found.decided_ms) == 2


def test_a_dead_engine_that_nobody_expects_is_seen(run_async: Any) -> None:
    """The control: an engine is declared to be well, and is not."""
    with fake_engines(1) as healthy, fake_engines(1, faults=KIND["dead"].faults) as patients:
        found = run_async(time_fault(healthy, patients, KIND["well"], "retract", "tag"))
    assert not found.as_expected
    (row, _) = fleet.fault_rows(KIND["well"], "retract", Outcome([10.0], [20.0]), found)
    assert not row.holds


@pytest.mark.parametrize(("waited", "holds"), [(500.0, True), (5000.0, False)])
def test_others_that_wait_too_long_are_a_missed_goal(waited: float, holds: bool) -> None:
    well, found = Outcome([100.0], [150.0]), Outcome([waited], [waited])
    (row, _) = fleet.fault_rows(KIND["dead"], "retract", well, found)
    assert row.holds is holds


def test_the_bench_goes_through_its_parts(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (KIND["well"], KIND["dead"])
    small: dict[str, Any] = {"SIZES": (1, 2), "ROUNDS": 1, "HEALTHY": 2, "FAULT_ROUNDS": 1, "DEADLINE_S": 1.5}
    small |= {"KINDS": kinds, "CLIENT_SIZES": (1, 2), "CLIENT_ROUNDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(fleet, name, value)
    rows: list[Row] = []
    run_async(fleet.bench_fleet(lambda text: None, rows))
    assert len({row.case for row in rows}) == len(rows) == 7 + 2 * 2 * (len(kinds) - 1) + 2 * 2
    assert all("inf" not in row.goal for row in rows)


def test_both_clients_make_the_same_calls(run_async: Any) -> None:
    with fake_engines(2) as urls:
        costs = run_async(clients.time_clients(urls, rounds=3))
    assert set(costs) == {"ours", "aiohttp"}
    assert all(len(found.wall) == len(found.cpu) == 3 and min(found.wall) > 0 for found in costs.values())
    assert all(row.peer for row in clients.client_rows(2, costs))


def test_without_aiohttp_the_row_names_what_is_missing(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "clients", lambda: ("ours",))
    with fake_engines(1) as urls:
        rows = clients.client_rows(1, run_async(clients.time_clients(urls, rounds=1)))
    assert [(row.peer, "aiohttp isn't installed" in row.case) for row in rows] == [(None, True)] * 2


def test_clients_that_are_refused_are_not_timed(run_async: Any) -> None:
    with fake_engines(1, faults={"/flush_cache": ["refuse"]}) as urls, pytest.raises(BenchError, match="HTTP 4"):
        run_async(clients.time_clients(urls, rounds=1))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_fake_engines_end_with_who_started_them(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import multiprocessing, time\n"
        "from slime_backend.simulation.fleet_process import fake_engines\n"
        "if __name__ == '__main__':\n"
        "    with fake_engines(1):\n"
        "        print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "        time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.wait(30)
    assert not wait_gone([child])
