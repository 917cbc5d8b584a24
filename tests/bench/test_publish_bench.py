"""`reef-slime bench publish` measured end to end, on fake engines: their times mean nothing and aren't looked at."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_backend.bench import publish
from slime_backend.bench.publish import Measured, in_turns
from slime_backend.bench.rows import BenchError, Row
from slime_backend.bench.slime_sequence import Stop
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.policy import decide
from slime_backend.publication import EngineOutcome, PublicationReport, Step
from slime_backend.simulation.fake_engine import FakeEngine

FAST = Deadlines(pause=1.0, flush=0.3, load=1.0, control=1.0, generate=60.0)


async def on_fakes(count: int, work: Any) -> Any:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
        clients = [await stack.enter_async_context(EngineClient(e.url, deadlines=FAST)) for e in engines]
        return await work(engines, clients)


def test_the_three_ways_in_turns_under_the_same_load(run_async: Any) -> None:
    async def work(engines: list[FakeEngine], clients: list[EngineClient]) -> tuple[Measured, list[Any]]:
        return await in_turns(clients, 3, rounds=2), engines

    found, engines = run_async(on_fakes(2, work))
    assert (found.engines, found.in_flight) == (2, 3)
    assert len(found.slime) == len(found.retract) == len(found.scoped) == 2  # the first of three isn't counted
    # slime's way ends what is in flight; ours doesn't, and reports what it did.
    assert all(lost > 0 for lost in found.aborted_by_slime)
    assert found.aborted_by_us == [0, 0]
    assert all(e.requests_retracted > 0 and e.flush_verified for r in found.retract for e in r.engines)
    assert all(e.requests_retracted == 0 and e.sweep_verified for r in found.scoped for e in r.engines)
    for engine in engines:
        steps = [path for path in engine.calls if path in ("/pause_generation", "/flush_cache")]
        assert steps == ["/pause_generation", "/flush_cache"] * 2 + ["/pause_generation"] + steps[5:]
        assert steps.count("/pause_generation") == 9  # three rounds of three
        assert not engine.paused
        assert not any(rank.requests for rank in engine.ranks)  # the load takes its requests along


def test_an_engine_that_does_not_flush_is_no_result(run_async: Any) -> None:
    """slime's way believes the answer; ours doesn't, and the bench doesn't time what wasn't done."""

    async def work(engines: list[FakeEngine], clients: list[EngineClient]) -> None:
        engines[1].faults["/flush_cache"] = ["lie"] * 1000
        await in_turns(clients, 1, rounds=1)

    with pytest.raises(BenchError, match=r"a publication failed.*hasn't flushed"):
        run_async(on_fakes(2, work))


def measured(slime_ms: float, our_ms: float) -> Measured:
    def report(verified: Step) -> PublicationReport:
        times: dict[Step, float] = {"pause": 1.0, verified: our_ms - 1, "label": 2.0, "resume": 3.0}
        engines = [EngineOutcome(f"e{i}", times, paused_ms=our_ms + 3 + i) for i in range(2)]
        return PublicationReport(
            "v1", "v0", decide("disjoint", "retract"), "none", verified_ms=our_ms, wall_ms=our_ms + 5, engines=engines
        )

    stops = [Stop(slime_ms, slime_ms + 5)] * 3
    return Measured(1, 32, stops, [report("flush")] * 3, [report("verify")] * 3, [32, 31, 32], [0, 0, 0])


@pytest.mark.parametrize(("slime_ms", "our_ms", "holds"), [(1005, 20, (True, True)), (1005, 40, (False, False))])
def test_the_goals(slime_ms: float, our_ms: float, holds: tuple[bool, bool]) -> None:
    found = measured(slime_ms, our_ms)
    barrier, _ = publish.barrier_rows(found, "1 engine, 32 in flight")
    split = publish.split_rows(found, "1 engine, 32 in flight")
    assert (barrier.holds, split[0].holds) == holds
    assert (split[-1].peer, split[-1].ours) == (32, 0)
    assert split[-1].holds


def test_the_bench_goes_through_its_parts(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake engines in the place of real ones, and no more than fit."""
    started: list[int] = []

    @asynccontextmanager
    async def fakes(model: Path, logs: Path, count: int) -> Any:
        started.append(count)
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
            yield [await stack.enter_async_context(EngineClient(e.url)) for e in engines]

    monkeypatch.setattr(publish, "engines_on", fakes)
    monkeypatch.setattr(publish, "make_tiny_model", lambda directory: directory)
    monkeypatch.setattr(publish, "fit_in_memory", lambda: 2)
    monkeypatch.setattr(publish, "IN_FLIGHT", (1, publish.USUAL))
    monkeypatch.setattr(publish, "ROUNDS", 1)
    rows: list[Row] = []
    log_lines: list[str] = []
    run_async(publish.bench_publish(log_lines.append, rows))
    assert started == [1, 1, 2]
    assert "4 engines need 8 GiB of free memory, which this machine has not" in log_lines
    assert sum(row.case.startswith("pause to flushed (ours: verified)") for row in rows) == 4
    assert len({row.case for row in rows}) == len(rows)
