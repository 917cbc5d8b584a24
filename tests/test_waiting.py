"""Requests that the engine tests keep in flight go on until they are ended, and one that is too short shows."""

from __future__ import annotations

import pytest

from slime_backend.publication import publish
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet
from tests.waiting import endless, landed, until


def test_endless_requests_go_on_over_a_publication_until_they_are_ended(run_async):
    async def scenario():
        async with fake_fleet(1, sharing="scoped") as (fleet, (fake,)):
            (client,) = [member.client for member in fleet.members.values()]
            async with endless(client, [[1] * 50, [2] * 50]) as flights:
                report = await publish(fleet, NameTransport(), "v1")
                answers = await landed(flights)
            return report, answers, len(fake.ranks[0].requests)

    report, answers, left = run_async(scenario())
    assert report.engines[0].in_flight == 2
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["v0", "v1"]
    assert left == 0


def test_a_request_that_ends_by_itself_is_named(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, _):
            (client,) = [member.client for member in fleet.members.values()]
            async with endless(client, [[1] * 50], tokens=20):
                pass

    with pytest.raises(AssertionError, match="more than its 20 tokens on this machine"):
        run_async(scenario())


def test_a_state_that_never_comes_is_named(run_async):
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: the moon is down"):
        run_async(until(lambda: False, "the moon is down", 0.05))
