"""What a publication must do on any real engine, on one tensor rank and on two."""

from __future__ import annotations

from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import DiskTransport
from slime_backend.transports.distributed import DistributedTransport
from tests.helpers import body, difference, fleet_on, load, prompt, reference, versions
from tests.waiting import endless, landed


def check_retract_publication(engine, models, sources, tmp_path, run_async):
    async def scenario():
        async with fleet_on(engine, decide("disjoint", "retract")) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            ids = prompt()
            before = [await client.generate(body(ids)) for _ in range(2)]
            async with endless(client, [prompt(300) for _ in range(3)]) as flying:
                report = await publish(fleet, DiskTransport(sources["b"], tmp_path), next(versions))
                after = [await client.generate(body(ids)) for _ in range(2)]
                return ids, before, report, after, await landed(flying)

    ids, before, report, after, flying = run_async(scenario(), 180)
    assert [a["meta_info"]["cached_tokens"] for a in before] == [0, len(ids) - 1]
    outcome = report.engines[0]
    assert outcome.flush_verified
    assert outcome.requests_retracted == 3
    assert outcome.tokens_to_prefill_again >= 3 * 300
    # The first same-prompt request after it computes everything, the second shares, both by the new weights.
    assert [a["meta_info"]["cached_tokens"] for a in after] == [0, len(ids) - 1]
    for answer in after:
        assert difference(models["b"], ids, answer) < 1e-5
        assert answer["output_ids"] == reference(models["b"], ids, answer)[1]
        assert difference(models["a"], ids, answer) > 1e-2
    # Each retracted request went on, sampled by both versions, with its later context computed again.
    for answer in flying:
        spans, tokens = answer["meta_info"]["weight_versions"], len(answer["output_ids"])
        assert [s["version"] for s in spans] == [report.previous_version, report.version]
        assert spans[-1]["end"] == tokens
        last = answer["meta_info"]["kv_provenance"][-1]["context"]
        assert last == [{"version": report.version, "start": 0, "end": 300 + tokens - 1}]


def check_transport(engine, models, sources, tmp_path, run_async, kind):
    def transport(source):
        if kind == "disk":
            return DiskTransport(source, tmp_path)
        return DistributedTransport(source, bucket_bytes=1 << 28 if kind == "distributed" else 1 << 17)

    async def scenario():
        async with fleet_on(engine, decide("disjoint", "retract")) as (fleet, client):
            await load(client, sources["a"], tmp_path)
            ids = prompt(100)
            mover = transport(sources["b"])
            try:
                reports = [await publish(fleet, mover, next(versions)) for _ in range(2)]
            finally:
                await mover.close()
            return ids, reports, await client.generate(body(ids))

    ids, reports, answer = run_async(scenario(), 120)
    assert not any(r.unconfirmed for r in reports)
    assert difference(models["b"], ids, answer) < 1e-5
    assert difference(models["a"], ids, answer) > 1e-2
