"""Confirmed means every tensor rank: what single ranks of a fake engine do otherwise, behind an answer of HTTP 200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slime_backend.engine_client import EngineClient, EngineProtocolError, EngineRefused
from slime_backend.evidence import why_not_same
from slime_backend.fleet import EngineUnfit, Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from slime_backend.wire import SchedulerReport
from tests.helpers import DEADLINES

SEEN = "no such directory on this node"
# What tensor rank 1 reports once the weights are loaded, and how the reason names it.
LOAD_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "its load failed": (
        {"loads": {"done": 0, "failed": 1, "last_failure": SEEN, "last_failed": True}},
        f"failed to load: {SEEN}",
    ),
    "its first update failed and nobody was told": (
        {"loads": {"done": 7, "failed": 1, "last_failure": SEEN, "last_failed": False}},
        f"failed to load: {SEEN}",
    ),
    "it carried out no load": (
        {"loads": {"done": 0, "failed": 0, "last_failure": None, "last_failed": False}},
        "carried out no update",
    ),
    "it is in another epoch": ({"epoch": 17}, "different epochs"),
    "it runs on": ({"kv": {"paused": False}}, "tensor rank 1 isn't paused"),
    "it is another process": ({"instance_id": "restarted"}, "tensor rank 1 restarted"),
}
KV_FAULTS = {
    "it kept its tree": ({"kv": {"tree_full_evictable": 5}}, "tensor rank 1 isn't empty: tree_full_evictable=5"),
    "it holds KV": ({"kv": {"requests_holding_kv": 1}}, "tensor rank 1 isn't empty: requests_holding_kv=1"),
    "it did not flush": ({"kv": {"flush_epoch": 0}}, "tensor rank 1 hasn't flushed"),
}


async def publish_with(
    engine: FakeEngine, sharing: Any, faults: dict[int, Any], step: str = "update_weights_from_disk"
) -> tuple[Fleet, Any]:
    """One publication to an engine whose tensor ranks begin to differ at `step`; the fleet and how it ended."""
    handler = getattr(engine, f"on_{step}")

    async def differ(body: dict[str, Any]) -> Any:
        engine.ranks[0].tensor_faults.update(faults)
        return await handler(body)

    setattr(engine, f"on_{step}", differ)
    async with EngineClient(engine.url, name="e0", deadlines=DEADLINES) as client:
        fleet = Fleet(decide("disjoint", sharing), "v0")
        await admit(fleet, client)
        try:
            return fleet, await publish(fleet, NameTransport(), "v1")
        except PublicationError as error:
            return fleet, error


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_tensor_ranks.DEADLINES", replace(DEADLINES, pause=0.3, flush=0.3))


@pytest.mark.parametrize("sharing", ["off", "retract", "scoped"])
def test_an_engine_whose_ranks_agree_is_confirmed(run_async: Any, sharing: str) -> None:
    async def scenario() -> None:
        async with FakeEngine(radix_cache=sharing != "off", tensor_ranks=2) as engine:
            fleet, report = await publish_with(engine, sharing, {})
            assert report.state == "resumed"
            assert [loads.done for loads in report.engines[0].loads] == [1, 1]
            assert fleet.routable()

    run_async(scenario())


@pytest.mark.parametrize("fault", LOAD_FAULTS)
@pytest.mark.parametrize("sharing", ["off", "retract", "scoped"])
def test_a_rank_that_did_otherwise_is_named_and_its_engine_retired(
    run_async: Any, short_deadlines: None, sharing: str, fault: str
) -> None:
    changed, words = LOAD_FAULTS[fault]

    async def scenario() -> None:
        async with FakeEngine(radix_cache=sharing != "off", tensor_ranks=2) as engine:
            fleet, error = await publish_with(engine, sharing, {1: changed})
            assert isinstance(error, PublicationError)
            assert words in str(error)
            assert engine.loaded == "v0" or not fleet.routable()  # nobody is routed to what a load may have changed
            assert not engine.paused

    run_async(scenario())


@pytest.mark.parametrize("fault", KV_FAULTS)
def test_a_flush_counts_only_where_every_rank_flushed(run_async: Any, short_deadlines: None, fault: str) -> None:
    changed, words = KV_FAULTS[fault]

    async def scenario() -> None:
        async with FakeEngine(tensor_ranks=2) as engine:
            _, error = await publish_with(engine, "retract", {1: changed}, "pause_generation")
            assert isinstance(error, PublicationError)
            assert words in str(error)
            assert engine.loaded == "v0"  # refused before a byte was moved

    run_async(scenario())


def test_the_answers_alone_would_confirm_it(run_async: Any) -> None:
    """The negative control: HTTP says success and rank 0 is well, which is all that SGLang's own answers tell."""

    async def scenario() -> None:
        async with FakeEngine(tensor_ranks=2) as engine:
            await publish_with(engine, "retract", {1: LOAD_FAULTS["its load failed"][0]})
            own = engine.ranks[0].report(engine.hooks)
            assert own["loads"] == {"done": 1, "failed": 0, "last_failure": None, "last_failed": False}
            assert engine.loaded == "v1"

    run_async(scenario())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("reef-slime isn't loaded in its process", "tensor rank 1: reef-slime isn't loaded in its process"),
        ({"hooks": {"kv_evidence": "active"}}, "scope (not loaded; active on tensor rank 0)"),
        ({"hooks": {}}, "the policy 'disjoint, prefix sharing scoped"),
    ],
)
def test_an_engine_with_a_rank_that_lacks_hooks_is_not_admitted(run_async: Any, fault: Any, words: str) -> None:
    async def scenario() -> str:
        engine = FakeEngine(tensor_ranks=2)
        async with engine, EngineClient(engine.url, name="e0", deadlines=DEADLINES) as client:
            engine.ranks[0].tensor_faults[1] = fault
            fleet = Fleet(decide("disjoint", "retract" if "scope (" in words else "scoped"), "v0")
            with pytest.raises(EngineUnfit) as refused:
                await admit(fleet, client)
            assert not fleet.members
            return str(refused.value)

    assert words in run_async(scenario())


def test_a_load_that_no_scheduler_heard_of_is_not_confirmed(run_async: Any) -> None:
    """The answer is success; the label that follows begins an epoch, so the epoch shows nothing."""

    async def scenario() -> str:
        async with FakeEngine() as engine, EngineClient(engine.url, name="e0", deadlines=DEADLINES) as client:
            engine.faults["/update_weights_from_disk"] = ["lie"]
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            await admit(fleet, client)
            with pytest.raises(PublicationError) as failed:
                await publish(fleet, NameTransport(), "v1")
            return str(failed.value)

    assert "rank 0 carried out no update of its weights" in run_async(scenario())


def test_a_transport_that_engines_do_not_count_needs_no_count(run_async: Any) -> None:
    """Its bytes come by RDMA; what a rank failed is still a reason."""

    class Remote(NameTransport):
        counted = False

        async def load(self, client: EngineClient, version: str) -> None:
            return None

    async def scenario() -> str:
        async with FakeEngine() as engine, EngineClient(engine.url, name="e0", deadlines=DEADLINES) as client:
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            await admit(fleet, client)
            return (await publish(fleet, Remote(), "v1")).state

    assert run_async(scenario()) == "resumed"


def test_an_update_that_was_answered_as_failed_and_sent_again_is_no_reason(run_async: Any) -> None:
    """As slime's collective update does where another engine of its group broke off."""

    class Again(NameTransport):
        async def load(self, client: EngineClient, version: str) -> None:
            with pytest.raises(EngineRefused, match="no model"):
                await client.load_from_disk("/no/such/model")
            await super().load(client, version)

    class OnceOnly(NameTransport):
        async def load(self, client: EngineClient, version: str) -> None:
            with pytest.raises(EngineRefused):
                await client.load_from_disk("/no/such/model")

    async def scenario(transport: NameTransport) -> str:
        async with FakeEngine(tensor_ranks=2) as engine, EngineClient(engine.url, name="e0") as client:
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            await admit(fleet, client)
            return (await publish(fleet, transport, "v1")).state

    assert run_async(scenario(Again())) == "resumed"
    with pytest.raises(PublicationError, match="failed to load: no such model"):
        run_async(scenario(OnceOnly()))


def test_a_report_of_an_older_plugin_is_one_clear_line(run_async: Any) -> None:
    async def scenario() -> str:
        async with FakeEngine() as engine, EngineClient(engine.url, name="e0", deadlines=DEADLINES) as client:
            report = engine.ranks[0].report
            new = ("loads", "tensor_rank", "tensor_size", "tensor_ranks", "missing_ranks")
            old = {name: value for name, value in report(engine.hooks).items() if name not in new}
            reply = await engine.on_reef_slime_reports({})

            async def answer(body: Any) -> Any:
                return reply._replace(body=[old])

            engine.on_reef_slime_reports = answer
            with pytest.raises(EngineProtocolError) as refused:
                await client.reports()
            return str(refused.value)

    message = run_async(scenario())
    assert "lacks loads, tensor_rank" in message
    assert "\n" not in message


def test_a_report_for_fewer_tensor_ranks_than_there_are_proves_nothing() -> None:
    rank = FakeEngine(tensor_ranks=4).ranks[0]
    whole = SchedulerReport.from_json(rank.report({}))
    assert why_not_same([whole], [whole]) == []
    assert why_not_same([whole], [replace(whole, tensor_ranks=whole.tensor_ranks[:2])]) == [
        "rank 0: 3 of 4 tensor ranks report"
    ]
