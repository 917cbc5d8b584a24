"""Retract publications on an SGLang that refuses every flush after a retract, with the hooks that amend it."""

from __future__ import annotations

import itertools
import json

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import RUN_HOOKS
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import DiskTransport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.wire import ACTIVE, NOT_NEEDED
from tests.helpers import DEADLINES, body, difference, fleet_on, load, logprobs, prompt, reference, versions
from tests.waiting import ENDLESS, Flight, decoding, endless, endless_body, landed, until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("older_generation")]

TOLERANCE = 1e-5  # float32 engine against Hugging Face
RETRACT = decide("disjoint", "retract")


def audited(models, ids, answer, versions_in_order):
    """Largest difference of each token's log-prob from a plain forward of the version that its span names.

    A plain forward is the right reference because a retract computes a request's whole context again.
    """
    got = logprobs(answer)
    by_version = {
        version: reference(models[key], ids, answer)[0] for version, key in zip(versions_in_order, "ab", strict=True)
    }
    return max(
        abs(got[i] - by_version[span["version"]][i])
        for span in answer["meta_info"]["weight_versions"]
        for i in range(span["start"], span["end"])
    )


async def paused_in_mid_prefill(client, tokens):
    """A request of many chunks, some of which are computed, paused in place. A longer one is sent where the pause came
    too late."""

    async def report():
        return (await client.reports())[0].kv

    for length in (4000, 7000):
        ids = prompt(length)
        flight = Flight(client, endless_body(ids, tokens))

        async def begun(flight=flight):
            return flight.task.done() or (await report()).chunked

        await until(begun, "a chunked prefill")
        await client.pause("in_place")
        await until(lambda: paused(report), "paused")
        if (await report()).chunked:
            return ids, flight
        await client.resume()
        await flight.drop()
    raise AssertionError("no pause met a chunked prefill")


async def paused(report):
    return (await report()).paused


def test_every_hook_is_active_but_the_one_for_a_fault_that_came_later(engine, run_async):
    async def hooks():
        async with EngineClient(engine.url) as client:
            return (await client.reports())[0].hooks

    assert run_async(hooks()) == {**dict.fromkeys(RUN_HOOKS, ACTIVE), "swa_anchors": NOT_NEEDED}


@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_retract_publication_with_requests_in_flight(engine, models, sources, tmp_path, run_async, kind):
    async def scenario():
        async with fleet_on(engine, RETRACT) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            ids, prompts = prompt(), [prompt(300) for _ in range(3)]
            before = [await client.generate(body(ids)) for _ in range(2)]
            mover = DiskTransport(sources["b"], tmp_path) if kind == "disk" else DistributedTransport(sources["b"])
            async with endless(client, prompts) as flying:
                report = await publish(fleet, mover, next(versions))
                after = [await client.generate(body(ids)) for _ in range(2)]
                flown = await landed(flying)
            await mover.close()
            return ids, prompts, before, report, after, flown

    ids, prompts, before, report, after, flown = run_async(scenario(), 240)
    assert [a["meta_info"]["cached_tokens"] for a in before] == [0, len(ids) - 1]
    outcome = report.engines[0]
    assert outcome.flush_verified
    assert outcome.confirmed
    assert outcome.requests_retracted == 3
    assert outcome.tokens_to_prefill_again >= 3 * 300
    assert [a["meta_info"]["cached_tokens"] for a in after] == [0, len(ids) - 1]
    for answer in after:
        assert difference(models["b"], ids, answer) < TOLERANCE
        assert answer["output_ids"] == reference(models["b"], ids, answer)[1]
        assert difference(models["a"], ids, answer) > 1e-2
    both = [report.previous_version, report.version]
    for own, answer in zip(prompts, flown, strict=True):
        meta = answer["meta_info"]
        spans = meta["weight_versions"]
        assert [s["version"] for s in spans] == both
        tokens = len(answer["output_ids"])
        assert (spans[0]["start"], spans[-1]["end"]) == (0, tokens)
        assert len(logprobs(answer)) == meta["completion_tokens"] == tokens
        assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
        assert audited(models, own, answer, both) < TOLERANCE
        # The contexts: built by the old weights up to the publication, then computed again by the new ones.
        first, last = meta["kv_provenance"]
        assert [(s["start"], s["end"], s["version"]) for s in (first, last)] == [
            (s["start"], s["end"], s["version"]) for s in spans
        ]
        assert first["context"] == [{"version": both[0], "start": 0, "end": 300 + spans[0]["end"] - 1}]
        assert last["context"] == [{"version": both[1], "start": 0, "end": 300 + tokens - 1}]
        assert [p["version"] for p in meta["prefills"]] == both


def test_retracted_twice_and_retracted_in_the_middle_of_a_chunked_prefill(engine, models, sources, tmp_path, run_async):
    """Two publications: the first finds a long prompt half prefilled, the second finds both requests again."""

    async def scenario():
        async with fleet_on(engine, RETRACT) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            short = prompt(300)
            async with endless(client, [short]) as flying:
                # Held there by a pause in place, until the publication's own retracts them both.
                long, prefilling = await paused_in_mid_prefill(client, ENDLESS - 7000)
                flying.append(prefilling)
                reports = [await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))]
                await decoding(flying)
                reports.append(await publish(fleet, DiskTransport(sources["a"], tmp_path), next(versions)))
                return reports, [short, long], await landed(flying)

    reports, prompts, answers = run_async(scenario(), 240)
    assert all(r.engines[0].flush_verified for r in reports)
    names = {reports[0].previous_version: "a", reports[0].version: "b", reports[1].version: "a"}
    for ids, answer in zip(prompts, answers, strict=True):
        spans, got = answer["meta_info"]["weight_versions"], logprobs(answer)
        assert spans[-1]["end"] == len(answer["output_ids"]) == len(got)
        assert spans[-1]["version"] == reports[1].version
        for span in spans:
            expected = reference(models[names[span["version"]]], ids, answer)[0]
            part = slice(span["start"], span["end"])
            assert max(abs(x - y) for x, y in zip(got[part], expected[part], strict=True)) < TOLERANCE
    assert len(answers[0]["meta_info"]["prefills"]) == 3


def test_a_load_that_flushes_by_itself_leaves_the_scheduler_alive(engine, sources, tmp_path, run_async):
    """SGLang asserts that the flush inside an update succeeds; after a retract it never would."""

    async def scenario():
        async with fleet_on(engine, RETRACT) as (_, client):
            sources["b"].save(tmp_path / "weights")
            async with endless(client, [prompt(300)]) as flying:
                await client.pause("retract")
                try:
                    await client.call(
                        "POST",
                        "/update_weights_from_disk",
                        body={"model_path": str(tmp_path / "weights"), "flush_cache": True},
                        deadline=DEADLINES.load,
                    )
                    kv = (await client.reports())[0].kv
                finally:
                    await client.resume()
                return kv, await landed(flying)

    kv, (answer,) = run_async(scenario(), 120)
    assert kv.is_empty
    assert kv.waiting == 1
    assert len(answer["meta_info"]["prefills"]) == 2


def test_a_health_check_still_sees_the_waiting_requests(engine, run_async):
    """A scheduler that took itself for idle would queue the check behind the requests that it holds back."""

    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            async with endless(client, [prompt(300) for _ in range(2)]):
                await client.pause("retract")
                try:
                    await client.flush()
                    assert not await client.healthy(deadline=2.0)  # paused: no token, so no answer
                    waiting = (await client.reports())[0].kv.waiting
                finally:
                    await client.resume()
            return waiting, await client.healthy(deadline=30.0)

    assert run_async(scenario(), 120) == (2, True)


def test_in_place_pause_still_refuses_the_flush(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client, endless(client, [prompt(300)]):
            await client.pause("in_place")
            try:
                with pytest.raises(RuntimeError, match="HTTP 400"):
                    await client.flush()
                return (await client.reports())[0].kv
            finally:
                await client.resume()

    kv = run_async(scenario(), 120)
    assert (kv.requests_holding_kv, kv.is_empty) == (1, False)


def test_a_bare_label_splits_the_spans_of_a_running_request(engine, run_async):
    """The schedulers hear of the label while they sample, and of nothing else."""

    async def scenario():
        async with fleet_on(engine, RETRACT) as (fleet, client), endless(client, [prompt(300)]) as flying:
            name = next(versions)
            await client.label(name)
            (answer,) = await landed(flying)
            return fleet.version, name, answer["meta_info"]

    old, new, meta = run_async(scenario(), 120)
    assert [s["version"] for s in meta["weight_versions"]] == [old, new]
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]


def test_a_stream_bears_the_spans_once_with_its_last_chunk(engine, run_async):
    async def scenario():
        async with fleet_on(engine, RETRACT) as (fleet, client):
            text = await client.call(
                "POST", "/generate", body={**body(prompt(50), 40), "stream": True}, deadline=DEADLINES.generate
            )
            return fleet.version, text

    version, text = run_async(scenario(), 60)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 1
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 40}]
    assert len(chunks[-1]["meta_info"]["prefills"]) == 1
