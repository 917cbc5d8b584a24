"""One request on a fleet of fake engines: streamed or not, through publications, deaths and aborts."""

from __future__ import annotations

import asyncio

import pytest

from reef_service.data_plane.generation import Generation
from slime_backend.engine_client import EngineRefused
from slime_backend.fleet import FleetError
from slime_backend.fleet.dispatch import RequestLost, RequestQuarantined
from slime_backend.publication import publish
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet
from tests.reef_service.harness import until

PROMPT = list(range(40))


def generation(fleet, tokens=50, stream=True, choose=None, **extra):
    sampling = {"max_new_tokens": tokens}
    return Generation(fleet, choose or (lambda found: found[0]), "r1", list(PROMPT), sampling, stream, extra)


def once_from(length, do):
    """Call `do` as soon as there are so many tokens; several may come together."""
    left = [do]

    async def progress(end):
        if end >= length and left:
            await left.pop()()

    return progress


def samples(engine, made, stream):
    """Whether the request has a token; streamed, whether that has come."""
    return made.output_ids if stream else any(request.sampled for request in engine.ranks[0].requests)


async def finish(made, on_progress=None):
    seen = []
    async for start, end in made.run():
        seen.append((start, end))
        if on_progress is not None:
            await on_progress(end)
    return seen


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_and_logprobs_are_the_engines_own(run_async, stream):
    async def work():
        async with fake_fleet(1, answer=lambda ids: [i + 1 for i in ids[:20]]) as (fleet, engines):
            made = generation(fleet, stream=stream)
            steps = await finish(made)
            return made, steps, engines[0].bodies

    made, steps, bodies = run_async(work())
    assert made.output_ids == list(range(1, 21))
    assert made.logprobs == [-1.0 - i / 1000 for i in range(20)]
    assert (made.finish_reason["type"], made.attempts, made.spliced) == ("stop", 1, False)
    assert (len(steps) > 1) == stream
    assert [start for start, _ in steps] == [0, *(end for _, end in steps[:-1])]
    assert bodies[0]["input_ids"] == PROMPT
    assert bodies[0]["return_logprob"] is True


def test_a_publication_in_the_middle_of_a_stream_is_lived_through(run_async):
    async def work():
        async with fake_fleet(2) as (fleet, _):
            made = generation(fleet, tokens=60)
            await finish(made, once_from(10, lambda: publish(fleet, NameTransport(), "v1")))
            return made

    made = run_async(work())
    assert len(made.output_ids) == 60
    assert not made.spliced
    spans = made.meta["weight_versions"]
    assert [s["version"] for s in spans] == ["v0", "v1"]
    assert made.meta["truth"] == spans


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_is_silent_is_replaced(run_async, stream):
    """Streamed tokens are kept and gone on from; an answer that nobody has seen is made again, complete."""

    async def work():
        async with fake_fleet(2) as (fleet, engines):
            made = generation(fleet, tokens=40, stream=stream)
            work = asyncio.create_task(finish(made))
            await until(lambda: samples(engines[0], made, stream))
            had = len(made.output_ids)
            fleet.retire(fleet.members["engine0"], "it doesn't answer: nothing within 1 s")
            await work
            return made, had, engines[1].bodies

    made, had, bodies = run_async(work())
    assert len(made.output_ids) == len(made.logprobs) == 40
    assert (made.attempts, made.engine) == (2, "engine1")
    assert made.spliced == stream
    if stream:
        sent = bodies[0]
        assert len(sent["input_ids"]) - len(PROMPT) >= had > 0
        assert sent["sampling_params"]["max_new_tokens"] == 40 - (len(sent["input_ids"]) - len(PROMPT))
    else:
        assert bodies[0]["input_ids"] == PROMPT


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_ends_is_not_replaced(run_async, stream):
    async def work():
        async with fake_fleet(2) as (fleet, engines):
            made = generation(fleet, tokens=40, stream=stream)
            work = asyncio.create_task(finish(made))
            await until(lambda: samples(engines[0], made, stream))
            await engines[0].stop()
            with pytest.raises(RequestQuarantined, match="engine0 ended during this request"):
                await work
            return engines[1].bodies, fleet.retired(), fleet.quarantine.count

    bodies, retired, count = run_async(work())
    assert (bodies, count) == ([], 1)
    assert "no longer answers" in retired["engine0"]


def test_no_token_of_an_unconfirmed_engine_is_passed_on(run_async):
    """The second engine lies about its load: it is retired, and what it streams afterwards is not read."""

    async def work():
        async with fake_fleet(2) as (fleet, engines):
            made = generation(fleet, tokens=80, choose=lambda found: found[-1])

            async def fail():
                engines[1].faults["/update_weights_from_disk"] = ["refuse"]
                await publish(fleet, NameTransport(), "v1")

            await finish(made, once_from(10, fail))
            return made, fleet.retired()

    made, retired = run_async(work())
    assert "load" in retired["engine1"]
    assert made.engine == "engine0"
    assert made.spliced
    assert len(made.output_ids) == 80


@pytest.mark.parametrize("stream", [True, False])
def test_stopping_ends_the_request_at_the_engine_and_keeps_its_provenance(run_async, stream):
    async def work():
        async with fake_fleet(1) as (fleet, engines):
            made = generation(fleet, tokens=5000, stream=stream)
            work = asyncio.create_task(finish(made))
            await until(lambda: samples(engines[0], made, stream))
            made.stop()
            await asyncio.wait_for(work, 60)
            return made, engines[0]

    made, engine = run_async(work())
    assert made.finish_reason["type"] == "abort"
    assert made.meta["kv_provenance"][-1]["end"] == len(made.output_ids) > 0
    assert engine.calls.count("/abort_request") == 1
    assert not engine.ranks[0].requests


def test_an_abort_that_nobody_asked_for_is_not_an_answer(run_async):
    async def work():
        async with fake_fleet(1) as (fleet, engines):
            made = generation(fleet, tokens=60)

            async def abort():
                engines[0].ranks[0].abort(None)

            await finish(made, once_from(10, abort))
            return made

    made = run_async(work())
    assert (len(made.output_ids), made.attempts, made.spliced) == (60, 2, True)


@pytest.mark.parametrize(("status", "asked"), [(400, 1), (503, 2)])
@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_that_says_the_request_is_wrong_is_a_refusal(run_async, stream, status, asked):
    """As SGLang answers a grammar that it can't compile. With another status (the control) it is asked again."""

    async def work():
        async with fake_fleet(1) as (fleet, engines):
            own, left = engines[0]._answer, [1]

            def answer(mine, planned, end, sent=0):
                found = own(mine, planned, end, sent)
                if left and mine.done.is_set():
                    left.pop()
                    message = "Failed to compile ebnf grammar"
                    found["meta_info"]["finish_reason"] = {"type": "abort", "message": message, "status_code": status}
                return found

            engines[0]._answer = answer
            made = generation(fleet, tokens=3, stream=stream)
            refusals = []
            try:
                await finish(made)
            except EngineRefused as error:
                refusals.append("Failed to compile" in error.seen)
            return len(engines[0].bodies), refusals

    assert run_async(work()) == (asked, [True] * (2 - asked))


def test_a_wrong_request_is_refused_and_not_repeated(run_async):
    async def work():
        async with fake_fleet(1) as (fleet, _):
            made = generation(fleet, tokens=0)
            with pytest.raises(EngineRefused, match="empty request"):
                await finish(made)
            return made

    assert run_async(work()).attempts == 1


def test_without_any_engine_it_says_so(run_async):
    async def work():
        async with fake_fleet(1) as (fleet, engines):
            await engines[0].stop()
            with pytest.raises((RequestLost, FleetError), match="no engine left"):
                await finish(generation(fleet))

    run_async(work())
