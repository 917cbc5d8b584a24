"""Publications on a real SGLang engine: what is cached, which weights answer, and the negative control."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

import pytest

from slime_backend.engine_client import EngineClient, EngineError, EngineRefused
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import DiskTransport, TransportError
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.wire import REPORT_KEY, REPORTS_PATH
from tests.helpers import DEADLINES, body, difference, fleet_on, load, logprobs, prompt, versions
from tests.publication_checks import check_retract_publication, check_transport
from tests.waiting import Flight, delayed, endless, endless_body

pytestmark = pytest.mark.engine


def test_the_route_of_its_own_answers_the_reports_of_server_info(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url) as client:
            await client.pause("retract")  # nothing changes between the two
            try:
                info = await client.server_info()
                return info, await client.call("GET", REPORTS_PATH)
            finally:
                await client.resume()

    info, reports = run_async(scenario())
    assert reports == [state[REPORT_KEY] for state in info["internal_states"]]
    assert reports[0]["kv"]["paused"]


def test_retract_publication_clears_everything_and_sharing_goes_on_within_a_version(
    engine, models, sources, tmp_path, run_async
):
    check_retract_publication(engine, models, sources, tmp_path, run_async)


@pytest.mark.parametrize("kind", ["disk", "distributed", "distributed in small buckets"])
def test_each_transport_brings_the_new_weights(engine, models, sources, tmp_path, run_async, kind):
    check_transport(engine, models, sources, tmp_path, run_async, kind)


def test_a_retracted_request_comes_back_with_all_its_tokens(engine, sources, tmp_path, run_async):
    """Each ends by itself. Where the machine is too fast for the publication to meet them, longer ones are sent."""

    async def scenario():
        async with fleet_on(engine, decide("disjoint", "retract")) as (fleet, client):
            for tokens in (200, 1000, 5000):
                flying = [Flight(client, endless_body(prompt(300), tokens)) for _ in range(3)]
                await delayed()
                report = await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
                answers = await asyncio.gather(*(flight.task for flight in flying))
                if report.engines[0].requests_retracted == 3:
                    return tokens, answers
            return None

    tokens, answers = run_async(scenario(), 240)
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == len(logprobs(answer)) == tokens
        assert answer["meta_info"]["weight_versions"][-1]["end"] == tokens


def test_negative_control_without_flush_old_prefixes_are_served_as_new(engine, models, sources, tmp_path, run_async):
    """The same harness with the pause and the cache chosen apart: this is what the transaction prevents."""

    async def scenario():
        async with fleet_on(engine, decide("disjoint", "unsafe")) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            ids = prompt()
            await client.generate(body(ids))
            await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
            return ids, await client.generate(body(ids)), fleet.version

    ids, answer, version = run_async(scenario(), 120)
    assert answer["meta_info"]["cached_tokens"] == len(ids) - 1
    assert {s["version"] for s in answer["meta_info"]["weight_versions"]} == {version}  # it claims the new weights
    assert difference(models["b"], ids, answer) > 1e-2


def test_evidence_tells_an_empty_cache_from_a_full_one(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            await client.generate(body(prompt()))
            used = await client.reports()
            await client.pause("retract")
            try:
                await client.flush()
                flushed = await client.reports()
            finally:
                await client.resume()
            return used[0].kv, flushed[0].kv

    used, flushed = run_async(scenario(), 60)
    assert not used.is_empty
    assert any(left.startswith("tree_full_evictable") for left in used.leftovers())
    assert flushed.is_empty
    assert flushed.flush_epoch == used.flush_epoch + 1


def test_in_place_pause_refuses_the_flush_and_the_evidence_says_so(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client, endless(client, [prompt(300)]):
            await client.pause("in_place")
            try:
                with pytest.raises(EngineError, match="HTTP 400"):
                    await client.flush()
                return (await client.reports())[0].kv
            finally:
                await client.resume()

    kv = run_async(scenario(), 60)
    assert kv.pause_mode == "in_place"
    assert kv.requests_holding_kv == 1
    assert kv.last_refusal is not None
    assert not kv.is_empty


def test_a_rejected_broadcast_is_an_error_within_the_deadline_and_the_engine_lives(
    engine, models, sources, tmp_path, run_async
):
    """No open session: 0.5.23 answers 400 while the trainer already stands in the broadcast."""

    class NoSession(EngineClient):
        def weight_session(self):
            return nullcontext()

    async def scenario():
        async with fleet_on(engine, decide("disjoint", "retract")) as (_, client):
            try:
                await client.call("POST", "/begin_weight_update", body={"selector": "all"})
            except EngineRefused:
                pytest.skip("this SGLang demands no session, so it rejects nothing here")
            await client.call("POST", "/end_weight_update", body={})
            await load(client, sources["a"], tmp_path)
            mover = DistributedTransport(sources["b"])
            async with NoSession(engine.url, name="engine0", deadlines=DEADLINES) as rejected:
                await mover.prepare("x", [rejected])
                started = time.monotonic()
                with pytest.raises((EngineError, TransportError)) as failed:
                    await mover.load(rejected, "x")
                seconds = time.monotonic() - started
            ids = prompt(100)
            still = await client.generate(body(ids))
            # The broken pair is replaced, and the next update gets through.
            await mover.prepare("y", [client])
            await mover.load(client, "y")
            await client.flush()
            after = await client.generate(body(ids))
            await mover.close()
            return str(failed.value), seconds, ids, still, after

    message, seconds, ids, still, after = run_async(scenario(), 120)
    assert "begin_weight_update" in message
    assert seconds < DEADLINES.load
    assert difference(models["a"], ids, still) < 1e-5
    assert difference(models["b"], ids, after) < 1e-5
