"""What a publication demands of an engine that is paused and loaded: nothing computed, nothing left to compute with.

Fake engines set the flag of a pause and go on, skip the wait for the device, or keep image features; the flag alone
would confirm each of them, which is the control.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from slime_backend.evidence import why_not_loaded, why_not_paused, why_not_swept
from slime_backend.fleet.kv_holders import FLAGGED_TREES, KNOWN_TREES, unhandled
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_scheduler import FakeRank
from slime_backend.simulation.transport import NameTransport
from slime_backend.wire import REPORT_KEY, KvEvidence, SchedulerReport
from tests.fake_fleet import fake_fleet, in_flight

SHARINGS = ("off", "scoped")  # an in-place pause: after a retract, an engine that goes on is never empty


def report(**counts: Any) -> SchedulerReport:
    """One rank's report: of an empty engine, but for `counts`."""
    plain = SchedulerReport.from_json(FakeRank(True, True, instance_id="one").report({}))
    return replace(plain, epoch=counts.pop("epoch", 0), kv=replace(plain.kv, **counts))


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"ignores_pause": True}, "forward passes while paused"),
        ({"skip_device_wait": True}, "waited for its device before 0 of them"),
        ({"image_features": 3, "skip_feature_clear": True}, "image_features=3"),
    ],
)
def test_an_engine_that_shows_the_flag_alone_is_not_confirmed(
    run_async: Any, sharing: str, fault: dict[str, Any], reason: str
) -> None:
    async def scenario() -> tuple[PublicationError, list[str], dict[str, str]]:
        async with fake_fleet(1, sharing=sharing, latency_s=0.02) as (fleet, (engine,)):
            for name, value in fault.items():
                setattr(engine.ranks[0], name, value)
            requests = await in_flight(fleet, tokens=100_000)
            client = next(iter(fleet.members.values())).client
            before = await client.reports()
            await client.pause("in_place")
            by_flag = why_not_paused(before, await client.reports(), fleet.policy)
            await client.resume()
            try:
                with pytest.raises(PublicationError) as caught:
                    await publish(fleet, NameTransport(), "v1")
            finally:
                for task in requests:
                    task.cancel()
            return caught.value, by_flag, dict(fleet.retired())

    error, by_flag, retired = run_async(scenario())
    assert by_flag == []
    assert reason in str(error)
    assert list(retired) == ["engine0"]


@pytest.mark.parametrize("sharing", ["off", "scoped", "retract"])
def test_an_engine_that_pauses_is_confirmed(run_async: Any, sharing: str) -> None:
    async def scenario() -> Any:
        async with fake_fleet(2, sharing=sharing) as (fleet, engines):
            for engine in engines:
                engine.ranks[0].image_features = 3
                engine.ranks[0].grammar_queue = 1  # holds no KV
            requests = await in_flight(fleet)
            published = await publish(fleet, NameTransport(), "v1")
            for task in requests:
                await task
            return published

    published = run_async(scenario())
    assert [engine.confirmed for engine in published.engines] == [True, True]


@pytest.mark.parametrize("sharing", ["off", "scoped", "retract"])
def test_the_verdict_on_a_load_needs_every_proof(sharing: str) -> None:
    policy = decide("disjoint", sharing)  # type: ignore[arg-type]
    at_pause = [report(forward_passes=7, device_waits=2, epoch=2)]
    good = report(forward_passes=7, device_waits=4, epoch=4)
    assert why_not_loaded(at_pause, [good], policy) == []
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"forward_passes": 8}, "launched 1 forward passes while paused (7 at the pause, 8 after the load)"),
        ({"device_waits": 3}, "waited for its device before 1 of them"),
        ({"device_waits_failed": 1}, "(1 failed)"),
        ({"image_features": 1}, "image_features=1"),
        ({"image_features": -1}, "image_features=-1"),  # a cache that wasn't found
    )
    for change, words in changes:
        (reason,) = why_not_loaded(at_pause, [replace(good, kv=replace(good.kv, **change))], policy)
        assert words in reason
    (reason,) = why_not_loaded(at_pause, [replace(good, instance_id="two")], policy)
    assert "restarted" in reason
    assert why_not_loaded(at_pause, [], policy)


def test_entries_in_a_cache_that_is_off_are_a_reason() -> None:
    kept = [report(tree_full_evictable=9)]
    assert "tree_full_evictable=9" in why_not_loaded([report()], kept, decide("disjoint", "off"))[0]
    assert why_not_loaded([report()], kept, decide("disjoint", "unsafe")) == []


def test_states_of_linear_attention_layers_count_as_kv() -> None:
    assert report(mamba_capacity=4, mamba_free=4).kv.is_empty
    for left in ({"mamba_capacity": 4, "mamba_free": 3}, {"tree_mamba_evictable": 1}, {"tree_mamba_protected": 1}):
        assert not report(**left).kv.is_empty
    old = [report(pauses=0)]
    swept = report(paused=True, pauses=1, pause_mode="in_place", epoch=1, swept_epoch=1)
    swept = replace(swept, hooks={"kv_evidence": "active", "kv_spans": "active", "scope": "active"})
    assert why_not_swept(old, [swept], decide("disjoint", "scoped")) == []
    swept = replace(swept, kv=replace(swept.kv, tree_mamba_evictable=1))
    assert "tree_mamba_evictable=1" in why_not_swept(old, [swept], decide("disjoint", "scoped"))[0]


def test_a_prefix_cache_of_an_unknown_class_is_refused() -> None:
    def refused(*trees: str) -> list[str]:
        states = [{REPORT_KEY: replace(report(), kv=replace(report().kv, tree=tree)).to_json()} for tree in trees]
        return [holder.name for holder in unhandled({"internal_states": states})]

    for tree in KNOWN_TREES | FLAGGED_TREES:
        assert refused(tree) == []
    assert refused("UnifiedRadixCache", "SomebodysCache") == ["unknown_cache"]  # on one rank of two
    assert refused("UnifiedRadixCache+c128") == ["unknown_cache"]
    assert unhandled({"internal_states": [{}, {REPORT_KEY: {"error": "no counts"}}]}) == []  # `reports` refuses those


def test_every_count_of_the_evidence_is_read_from_json() -> None:
    whole = report().kv
    assert KvEvidence.from_json({f.name: getattr(whole, f.name) for f in fields(whole)}) == whole
