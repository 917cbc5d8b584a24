"""What a publication says of each engine: at which step it failed and why, how far the whole had come, and what is
recorded of it. Against fake engines over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

import pytest

from slime_backend.policy import decide
from slime_backend.publication import (
    EngineOutcome,
    Publication,
    PublicationError,
    PublicationReport,
    State,
    Step,
    pause_generation_for_update,
    pause_to_verified_ms,
    publish,
    times_of,
)
from slime_backend.simulation.transport import NameTransport
from slime_backend.tracking.alerts import publication_alerts
from slime_backend.wire import REPORTS_PATH
from tests.fake_fleet import fake_fleet, in_flight
from tests.waiting import until

NOT_PAUSED = "rank 0 isn't paused"


@pytest.mark.parametrize(
    ("sharing", "step", "title"),
    [
        ("off", "verify", "Pause not verified"),
        ("scoped", "verify", "Pause not verified"),
        ("retract", "flush", "Flush not verified"),  # the control: there a flush is made, and isn't verified
    ],
)
def test_an_engine_that_only_says_it_paused_fails_at_the_step_that_was_made(run_async, sharing, step, title):
    async def scenario():
        async with fake_fleet(sharing=sharing) as (fleet, engines):
            engines[1].faults["/pause_generation"] = ["lie"]
            report = await publish(fleet, NameTransport(), "v1")
            return report, ["/flush_cache" in e.calls for e in engines]

    report, flushed = run_async(scenario())
    assert flushed == [sharing == "retract"] * 2
    assert [step in e.times for e in report.engines] == [True, True]
    failed = report.engines[1]
    assert failed.failed_step == step
    assert NOT_PAUSED in failed.reason
    assert [a.title for a in publication_alerts(report)] == [title, "Engine retired"]
    assert publication_alerts(report)[0].text.startswith(f"engine1 at v1: {step}: ")


HANGS = [
    ("retract", "/pause_generation", "pause"),
    ("retract", "/flush_cache", "flush"),
    ("off", "verify", "verify"),
    ("scoped", "verify", "verify"),
    ("retract", "/update_weights_from_disk", "load"),
    ("retract", "/update_weight_version", "label"),
]


@pytest.mark.parametrize(("sharing", "path", "step"), HANGS, ids=[f"{s}-{step}" for s, _, step in HANGS])
def test_a_cancelled_publication_names_the_step_that_it_was_in(run_async, sharing, path, step):
    """No state of the publication stands in a step's place."""

    async def scenario():
        async with fake_fleet(sharing=sharing) as (fleet, engines):
            if path == "verify":  # it reads reports, as the look does: only those behind the pause hang
                _then_hang(engines[0], "/pause_generation", REPORTS_PATH)
            else:
                engines[0].faults[path] = ["hang_before"]
            publication = Publication(fleet, NameTransport(), "v1")
            running = asyncio.create_task(publication.run())
            await until(lambda: publication.step == step and _asked(engines[0], path), f"it is in {step}")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return publication.report, fleet.retired(), [e.paused for e in engines]

    report, retired, paused = run_async(scenario())
    assert {e.failed_step for e in report.engines} == {step}
    assert report.engines[0].reason == "the publication was cancelled"
    assert (report.state, paused) == ("failed", [False, False])
    for why in retired.values():
        assert why == f"not confirmed at v1: {step}: the publication was cancelled"
    assert list(retired) == (["engine0", "engine1"] if step in ("load", "label") else [])
    assert [e.stayed for e in report.engines] == [not retired] * 2


def _then_hang(engine, after, path):
    """Calls of `path` hang once `after` was called."""
    handler = engine.on_pause_generation

    async def paused(body):
        engine.faults[path] = ["hang_before"] * 2
        return await handler(body)

    assert after == "/pause_generation"
    engine.on_pause_generation = paused


def _asked(engine, path):
    if path == "verify":
        return (
            "/pause_generation" in engine.calls
            and REPORTS_PATH in engine.calls[engine.calls.index("/pause_generation") :]
        )
    return path in engine.calls


class _States(list):
    """The calls of an engine, with the publication's state at each."""

    def __init__(self, publication):
        super().__init__()
        self.publication, self.seen = publication, {}

    def append(self, path):
        super().append(path)
        self.seen.setdefault(path, []).append(self.publication.report.state)


@pytest.mark.parametrize("sharing", ["retract", "off", "scoped"])
def test_each_state_begins_when_no_engine_is_in_the_step_before_any_more(run_async, sharing):
    async def scenario():
        async with fake_fleet(3, sharing=sharing) as (fleet, engines):
            publication = Publication(fleet, NameTransport(), "v1")
            for number, engine in enumerate(engines):
                engine.calls, engine.latency_s = _States(publication), 0.005 * number
            await publication.run()
            return publication.report, [e.calls.seen for e in engines]

    report, seen = run_async(scenario())
    assert report.state == "resumed"
    for states in seen:
        assert set(states["/pause_generation"]) == {"open"}
        assert "paused" in states[REPORTS_PATH]  # the evidence of the pause is read in it
        assert set(states.get("/flush_cache", ["paused"])) == {"paused"}
        assert set(states["/update_weights_from_disk"]) == {"verified"}
        assert set(states["/weights_checker"]) == {"open", "loaded"}
        assert set(states["/update_weight_version"]) == {"weights verified"}
        assert set(states["/continue_generation"]) == {"labelled"}
    reached = {"paused", "verified", "loaded", "weights verified", "labelled", "open", "resumed", "failed"}
    assert reached == set(get_args(State))
    assert not reached & set(get_args(Step))


def test_the_first_failure_explains_and_a_resume_that_fails_too_is_added(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            engines[1].faults["/update_weights_from_disk"] = ["refuse"]
            engines[1].faults["/continue_generation"] = ["refuse"] * 3
            return await publish(fleet, NameTransport(), "v1"), fleet.retired()

    report, retired = run_async(scenario())
    failed = report.engines[1]
    assert failed.failed_step == "load"
    load, resume = failed.reason.split("; resume: ")
    assert load
    assert resume
    assert {"load", "resume"} <= set(failed.times)
    assert retired["engine1"].startswith("not confirmed at v1: load: ")


def test_a_failure_always_has_a_reason_and_keeps_its_step():
    outcome = EngineOutcome("e")
    outcome.fail("load", "")
    outcome.fail("resume", "HTTP 500")
    assert (outcome.failed_step, outcome.reason) == ("load", "no reason was given; resume: HTTP 500")


def test_an_engine_that_a_failed_publication_left_alone_is_not_called_retired(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            engines[0].faults["/flush_cache"] = ["refuse"] * 1000
            engines[1].faults["/update_weights_from_disk"] = ["refuse"]
            with pytest.raises(PublicationError) as failed:
                await publish(fleet, NameTransport(), "v1")
            return failed.value.report, fleet

    report, fleet = run_async(scenario())
    assert [m.name for m in fleet.routable()] == ["engine0"]
    assert [(e.fate, e.failed_step) for e in report.engines] == [("left as it was", "flush"), ("retired", "load")]
    titles = [a.title for a in publication_alerts(report)]
    assert titles == ["Flush not verified", "Engine not updated", "Engine retired", "Publication failed"]


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_a_recorded_line_has_each_steps_time_by_its_name_and_is_read_back():
    outcome = EngineOutcome("e", {"pause": 2.0, "verify": 3.0}, paused_ms=9.0, failed_step="load", reason="no")
    report = PublicationReport("v1", "v0", decide("disjoint", "retract"), "disk", engines=[outcome])
    row = json.loads(json.dumps(report.to_json()))
    (engine,) = row["engines"]
    assert (engine["pause_ms"], engine["verify_ms"], engine["flush_ms"], engine["load_ms"]) == (2.0, 3.0, None, None)
    assert (engine["paused_ms"], engine["failed_step"], "times" in engine) == (9.0, "load", False)
    assert times_of(engine) == outcome.times
    assert pause_to_verified_ms(times_of(engine)) == 5.0


def test_a_line_of_an_older_version_is_read_as_it_was_meant():
    """There the check of an in-place pause was timed as a flush."""
    old = {"engine": "e", "pause_ms": 2.0, "flush_ms": 3.0, "load_ms": None, "paused_ms": 9.0, "flush_verified": False}
    assert times_of(old) == {"pause": 2.0, "flush": 3.0}
    assert pause_to_verified_ms(times_of(old)) == 5.0
    assert pause_to_verified_ms(times_of({"engine": "e", "pause_ms": 2.0})) is None


# ---- for a program that updates its engines itself -----------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["retract", "off", "scoped"])
def test_clients_alone_are_paused_and_verified(run_async, sharing):
    """It touches no label and no weights, says who may be loaded, and leaves the resume to its caller."""
    policy = decide("disjoint", sharing)

    async def scenario():
        async with fake_fleet(3, sharing=sharing) as (fleet, engines):
            tasks = await in_flight(fleet, tokens=300)
            engines[1].faults["/pause_generation"] = ["lie"]
            engines[2].faults["/pause_generation"] = ["refuse"]
            clients = [member.client for member in fleet.members.values()]
            try:
                found = await pause_generation_for_update(clients, policy)
                paused = [e.paused for e in engines]
            finally:
                for client in clients:
                    await client.resume()
            await asyncio.gather(*tasks)
            return found, clients, paused, [e.calls for e in engines]

    found, clients, paused, calls = run_async(scenario())
    assert found.ready == (clients[0],)
    assert paused == [True, False, False]
    assert sorted(found.refused) == ["engine1", "engine2"]
    assert found.refused["engine1"].startswith("flush: " if sharing == "retract" else "verify: ")
    assert NOT_PAUSED in found.refused["engine1"]
    assert found.refused["engine2"].startswith("pause: ")
    ready = found.outcomes["engine0"]
    assert ready.in_flight > 0
    assert [report.kv.paused for report in ready.evidence] == [True]
    assert ready.flush_verified == (sharing == "retract")
    assert (ready.evidence[0].kv.is_empty, "/flush_cache" in calls[0]) == (sharing == "retract",) * 2
    assert not {"/update_weights_from_disk", "/update_weight_version"} & {path for each in calls for path in each}
