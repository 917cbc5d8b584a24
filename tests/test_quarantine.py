"""A request during which an engine ended is in no second one; one that never reached it is."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.engine_client import EngineUncalled
from slime_backend.fleet import dispatch
from slime_backend.fleet.dispatch import RequestQuarantined, generate
from slime_backend.fleet.quarantine import End, Quarantine, key_of
from tests.fake_fleet import fake_fleet, in_flight, request
from tests.waiting import until


def test_an_engine_that_ends_takes_no_other_with_it(run_async):
    async def scenario():
        async with fake_fleet(3) as (fleet, engines):
            for engine in engines:
                engine.faults["/generate"] = ["die"]
            with pytest.raises(RequestQuarantined, match=r"ended during this request"):
                await generate(fleet, request(5))
            with pytest.raises(RequestQuarantined, match=r"not sent to any engine"):
                await generate(fleet, request(5))
            return [e.dead for e in engines], fleet.quarantine.count, fleet.quarantine.refused

    dead, count, refused = run_async(scenario())
    assert (sum(dead), count, refused) == (1, 1, 1)


def test_all_that_were_there_are_given_up_and_may_come_again_once(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            asked = await in_flight(fleet, 6)
            await engines[0].stop()
            found = await asyncio.gather(*asked, return_exceptions=True)
            again = await generate(fleet, request(200))
            return found, again.engine, fleet.quarantine.count

    found, engine, count = run_async(scenario())
    given_up = [f for f in found if isinstance(f, RequestQuarantined)]
    assert (len(given_up), count, engine) == (3, 3, "engine1")


def test_a_request_that_never_reached_the_engine_is_sent_to_the_other(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for member in fleet.members.values():
                member.client._channel.close()  # no kept connection, on which it could be sent
            await engines[0].stop()
            answers = await asyncio.gather(*(generate(fleet, request(3)) for _ in range(4)))
            return {a.engine for a in answers}, fleet.quarantine.count

    assert run_async(scenario()) == ({"engine1"}, 0)


def test_an_engine_that_is_back_as_the_same_process_had_not_ended(run_async):
    """Its network was away: the request goes on, and nothing is remembered of it."""

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            asked = asyncio.create_task(generate(fleet, request(100)))
            await until(lambda: any(r.sampled for r in engines[0].ranks[0].requests), "a token is sampled")
            engines[0].dead = True
            for connection in list(fleet.members["engine0"].client._channel._busy):
                connection.close()
            await until(fleet.retired, "the engine is retired")
            engines[0].dead = False
            answer = await asked
            return len(answer.body["output_ids"]), bool(fleet.quarantine), fleet.quarantine.count

    assert run_async(scenario()) == (100, False, 0)


def test_what_this_process_lacks_retires_nobody(run_async, monkeypatch):
    """No descriptor is left, which is a type of its own. It is waited for, and then it is the caller's to know."""
    monkeypatch.setattr(dispatch, "LOCAL_S", 0.3)

    async def scenario():
        async with fake_fleet(2) as (fleet, _):
            loop = asyncio.get_running_loop()

            async def full(*args, **kwargs):
                raise OSError(24, "Too many open files")

            for member in fleet.members.values():
                member.client._channel.close()
            with monkeypatch.context() as patch:
                patch.setattr(loop, "create_connection", full)
                with pytest.raises(EngineUncalled, match="Too many open files"):
                    await generate(fleet, request(3))
            answer = await generate(fleet, request(3))
            return len(answer.body["output_ids"]), fleet.retired(), [m.status for m in fleet.members.values()]

    assert run_async(scenario()) == (3, {}, ["confirmed", "confirmed"])


def test_who_is_let_in_again():
    held = Quarantine()
    many = End()
    held.add("alone", "engine0", "it ended", End())
    for key in ("a", "b"):
        held.add(key, "engine1", "it ended", many)
    assert [bool(held.why_refused(key)) for key in ("alone", "a", "b", "other")] == [True, False, False, False]
    held.add("a", "engine2", "it ended too", End())
    assert [bool(held.why_refused(key)) for key in ("a", "b")] == [True, False]
    held.keep_s = -1.0
    assert not held.why_refused("alone")
    assert not held


def test_two_requests_are_the_same_if_they_ask_for_the_same():
    assert key_of([1, 2], {"a": 1, "b": 2}) == key_of([1, 2], {"b": 2, "a": 1})
    assert key_of([1, 2], {"a": 1}) != key_of([1, 2], {"a": 2})
    assert key_of([1, 2], {}) != key_of([1], {})
