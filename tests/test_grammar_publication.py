"""A request that waits for its grammar under a retract publication, on fake engines with SGLang's rule: a flush is
refused while one waits, and a paused scheduler doesn't look whether its grammar is ready."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.engine_client import Deadlines
from slime_backend.fleet.dispatch import generate
from slime_backend.publication import pause, publish
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet, request

HOOKED = ("kv_evidence", "kv_spans", "scope", "grammar_flush")
WITHOUT = HOOKED[:-1]


def guided(tokens=3):
    return {**request(tokens), "sampling_params": {"max_new_tokens": tokens, "regex": "(yes|no)"}}


async def one_waits(fleet, engines, count=1):
    asked = [asyncio.create_task(generate(fleet, guided())) for _ in range(count)]
    while sum(r.grammar for e in engines for rank in e.ranks for r in rank.requests) < count:
        await asyncio.sleep(0.002)
    return asked


async def answered(asked, engines):
    """From now on every grammar is ready, also of a request that is sent again."""
    while not all(task.done() for task in asked):
        compiled(engines)
        await asyncio.sleep(0.002)
    return [task.result() for task in asked]


def compiled(engines):
    for engine in engines:
        for rank in engine.ranks:
            for waiting in rank.requests:
                waiting.compiled = True


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_hook_nothing_is_waited_for(run_async, ranks):
    async def scenario():
        async with fake_fleet(2, hooks=HOOKED, grammar_s=600.0, ranks=ranks) as (fleet, engines):
            asked = await one_waits(fleet, engines, 4)
            report = await publish(fleet, NameTransport(), "v1")
            calls = [e.calls.count("/continue_generation") for e in engines]
            answers = await answered(asked, engines)
            return report.unconfirmed, calls, [a.body["meta_info"]["weight_versions"] for a in answers]

    unconfirmed, resumes, spans = run_async(scenario())
    assert (unconfirmed, resumes) == ({}, [1, 1])
    assert {s["version"] for found in spans for s in found} == {"v1"}


def test_without_it_the_engine_runs_for_a_moment_until_the_grammar_is_ready(run_async):
    """With a request in flight, which is retracted twice and answered once."""

    async def scenario():
        async with fake_fleet(2, hooks=WITHOUT, grammar_s=600.0, token_s=0.005) as (fleet, engines):
            flying = [asyncio.create_task(generate(fleet, request(300))) for _ in range(2)]
            asked = await one_waits(fleet, engines)
            publishing = asyncio.create_task(publish(fleet, NameTransport(), "v1"))
            while not any(rank.flush_refused for e in engines for rank in e.ranks):
                await asyncio.sleep(0.002)
            compiled(engines)
            report = await publishing
            answers = await asyncio.gather(*flying, *asked)
            return report, [a.attempts for a in answers], [e.paused for e in engines], answers

    report, attempts, paused, answers = run_async(scenario())
    assert report.unconfirmed == {}
    assert paused == [False, False]
    assert attempts == [1, 1, 1]
    for answer in answers:
        assert answer.body["meta_info"]["weight_versions"] == answer.body["meta_info"]["truth"]


def test_without_it_a_grammar_that_isn_t_ready_ends_the_publication_early(run_async, monkeypatch):
    """Not after the flush's deadline, while which all engines would stand still; both serve on at the old version."""
    monkeypatch.setattr(pause, "GRAMMAR_MOMENT_S", 0.05)

    async def scenario():
        async with fake_fleet(2, hooks=WITHOUT, grammar_s=600.0) as (fleet, engines):
            for member in fleet.members.values():
                member.client.deadlines = Deadlines()  # the flush has 30 s
            asked = await one_waits(fleet, engines)
            report = await asyncio.wait_for(publish(fleet, NameTransport(), "v1"), 15)
            (answer,) = await answered(asked, engines)
            again = await publish(fleet, NameTransport(), "v2")
            return report, answer, [e.paused for e in engines], again

    report, answer, paused, again = run_async(scenario())
    (reason,) = report.unconfirmed.values()
    assert "requests wait for their grammars" in reason
    assert "start the engine with the hook grammar_flush" in reason
    assert len(answer.body["output_ids"]) == 3
    assert paused == [False, False]
    assert again.unconfirmed == {}  # it is offered admission again, and nothing waits any more


def test_a_rival_that_pauses_in_such_a_moment_is_noticed(run_async):
    async def scenario():
        async with fake_fleet(2, hooks=WITHOUT, grammar_s=600.0) as (fleet, engines):
            asked = await one_waits(fleet, engines)
            waits = next(e for e in engines if any(r.grammar for r in e.ranks[0].requests))
            resume = waits.on_continue_generation

            async def resume_and_pause(body):
                answer = await resume(body)
                waits.on_continue_generation = resume
                await waits.on_pause_generation({"mode": "retract"})
                return answer

            waits.on_continue_generation = resume_and_pause
            report = await publish(fleet, NameTransport(), "v1")
            await answered(asked, engines)
            return report.unconfirmed, [e.paused for e in engines]

    unconfirmed, paused = run_async(scenario())
    assert "still paused" in str(unconfirmed)
    assert paused == [False, False]
