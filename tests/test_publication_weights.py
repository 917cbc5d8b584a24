"""The weights of a publication by their content, on fake engines: who is retired, and what is recorded."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.fleet.weights import VerifyWeights
from slime_backend.publication import PublicationError, PublicationReport, publish
from slime_backend.simulation.fake_engine import TENSORS, digest_of
from slime_backend.simulation.transport import NameTransport
from tests.fake_fleet import fake_fleet

MISSED = TENSORS[1]


class Sending(NameTransport):
    """Knows the digests of what it sends."""

    def __init__(self, weights: str) -> None:
        self.weights = weights

    async def digests(self) -> Mapping[str, tuple[str, ...]]:
        return {name: (digest_of(self.weights, name),) for name in TENSORS}


async def published(version: str, fleet, known: bool = True) -> PublicationReport:
    try:
        return await publish(fleet, Sending(version) if known else NameTransport(), version)
    except PublicationError as error:
        return error.report


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_that_missed_a_tensor_is_retired_and_the_tensor_named(run_async, known):
    async def scenario():
        async with fake_fleet(3) as (fleet, engines):
            honest = await published("v1", fleet, known)
            engines[1].kept = {MISSED: "v1"}
            return honest, await published("v2", fleet, known), fleet.routable(), engines[1]

    honest, report, routable, stale = run_async(scenario())
    assert [e.weights_verified for e in honest.engines] == [True] * 3
    assert [(e.tensors_verified, e.tensors_looked_at) for e in honest.engines] == [(len(TENSORS), len(TENSORS))] * 3
    assert [e.weights_verified for e in report.engines] == [True, False, True]
    assert report.unconfirmed == {"engine1": f"weights: {MISSED} kept its old bytes"}
    assert [m.name for m in routable] == ["engine0", "engine2"]
    # It never answered as the new version, and its label no longer vouches for the old one.
    assert stale.label == "unconfirmed-v2"
    assert stale.calls.index("/update_weight_version", stale.calls.index("/update_weight_version") + 1) < (
        len(stale.calls) - 1 - stale.calls[::-1].index("/continue_generation")
    )


def test_the_same_fault_passes_where_weights_are_not_looked_at(run_async):
    """The control."""

    async def scenario():
        async with fake_fleet(3) as (fleet, engines):
            fleet.weights.mode = "off"
            await published("v1", fleet)
            engines[1].kept = {MISSED: "v1"}
            return await published("v2", fleet), engines

    report, engines = run_async(scenario())
    assert not report.unconfirmed
    assert [e.weights_verified for e in report.engines] == [None] * 3
    assert all("/weights_checker" not in e.calls for e in engines)


def test_one_engine_alone_is_held_against_what_was_sent(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            await published("v1", fleet)
            engines[0].kept = dict.fromkeys(TENSORS, "v1")
            return await published("v2", fleet)

    report = run_async(scenario())
    assert report.state == "failed"
    assert report.engines[0].reason == f"{', '.join(TENSORS)} kept its old bytes"


def test_nothing_is_shown_where_nothing_is_known(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, _):
            return await published("v1", fleet, known=False)

    (outcome,) = run_async(scenario()).engines
    assert (outcome.confirmed, outcome.weights_verified, outcome.tensors_verified) == (True, None, 0)
    assert "nothing is known" in outcome.weights_not_verified


def test_an_engine_without_the_call_is_published_to_and_named(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            engines[0].on_weights_checker = None
            reports = [await published(version, fleet) for version in ("v1", "v2")]
            return reports, engines[0].calls

    reports, calls = run_async(scenario())
    for report in reports:
        assert not report.unconfirmed
        assert "HTTP 404" in report.engines[0].weights_not_verified
    assert [report.engines[1].weights_verified for report in reports] == [None, True]
    assert calls.count("/weights_checker") == 1  # it isn't asked again and again


def test_an_engine_that_no_longer_answers_is_not_confirmed(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            await published("v1", fleet)
            engines[0].faults["/weights_checker"] = ["refuse"]
            return await published("v2", fleet)

    report = run_async(scenario())
    assert list(report.unconfirmed) == ["engine0"]
    assert report.unconfirmed["engine0"].startswith("weights: HTTP 400: ")


@pytest.mark.parametrize(("mode", "parts"), [("full", 1), ("auto", 1), ("sample", 8)])
def test_samples_come_round_to_every_tensor(run_async, mode: VerifyWeights, parts: int):
    looked: list[int] = []

    async def scenario():
        async with fake_fleet(2) as (fleet, _):
            fleet.weights.mode = mode
            for number in range(parts + 1):
                report = await published(f"v{number + 1}", fleet)
                assert not report.unconfirmed
                looked.append(report.engines[0].tensors_looked_at)

    run_async(scenario())
    assert sum(looked[:parts]) == len(TENSORS)
    assert looked[0] == looked[parts]


def test_a_first_look_that_had_to_wait_is_not_remembered(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, _):
            fleet.weights.slowest_ms = 1e6  # it waited behind a long step
            return [(await published(f"v{n}", fleet)).engines[0].tensors_looked_at for n in (1, 2)]

    first, second = run_async(scenario())
    assert first < second == len(TENSORS)


def test_a_restarted_engine_is_looked_at_again(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            await published("v1", fleet)
            await engines[0].restart("v1")
            before = engines[0].calls.count("/weights_checker")
            report = await published("v2", fleet)
            return before, engines[0].calls.count("/weights_checker"), report

    before, after, report = run_async(scenario())
    assert (before, after) == (0, 2)
    assert not report.unconfirmed


async def digests(url: str):
    async with EngineClient(url) as client:
        return await client.weight_digests(["lm_head"])


def test_the_call_leaves_out_what_it_is_asked_to(run_async):
    async def scenario():
        async with fake_fleet(1, ranks=2, tensor_ranks=2) as (_, engines):
            return await digests(engines[0].url)

    ranks = run_async(scenario())
    assert [rank.place for rank in ranks] == [(0, 2, 0, 1), (1, 2, 0, 1)] * 2
    assert all(set(rank.digests) == set(TENSORS[:2]) for rank in ranks)


@pytest.mark.parametrize("as_json", [False, True])
def test_publish_shows_what_happened_where_no_engine_is_confirmed(run_async, tmp_path, as_json):
    """By the command itself: the report, and then the line and the code of a failure."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, str(tmp_path / "model.safetensors"))

    async def scenario():
        async with FakeEngine() as engine:
            engine.faults["/update_weights_from_disk"] = ["refuse"]
            command = ["publish", "--checkpoint", str(tmp_path), "--version", "v9", "--engine", engine.url]
            return await asyncio.to_thread(command_line, *command, *["--json"] * as_json)

    done = run_async(scenario(), 60)
    assert done.returncode == 1
    assert (json.loads(done.stdout)["state"] == "failed") if as_json else ("retired: load:" in done.stdout)
    assert done.stderr.startswith("reef-slime: publication of v9 failed on every engine: load:")
