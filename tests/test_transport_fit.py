"""Engines that a transport can't serve are found before anybody is paused; the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime_backend.engine_client import Deadlines
from slime_backend.event_loop import LoopThread
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.http_server import Reply
from slime_backend.transports import CheckpointTransport, served
from slime_backend.transports.collective import CollectiveTransport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.transports.served import local_address, why_no_group, why_not_from_disk, why_unreachable
from tests.fake_fleet import FAST, fake_fleet

TOUCHED = {"/pause_generation", "/flush_cache", "/init_weights_update_group", "/begin_weight_update"}


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ({"dp_size": 2}, "data-parallel"),
        ({"dp_size": 2, "enable_dp_attention": True}, None),
        ({"dp_size": 1}, None),
        ({"weight_cache_mode": "daemon"}, "weight-cache-mode daemon"),
        ({"weight_cache_mode": "off"}, None),
        ({"load_format": "sharded_state"}, None),
        ({}, None),
    ],
)
def test_who_takes_tensors(info, names):
    why = why_no_group(info)
    assert (why is None) if names is None else names in (why or "")


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ({"dp_size": 4, "load_format": "auto"}, False),
        ({"load_format": "dummy"}, False),
        ({"load_format": "safetensors"}, False),
        ({"load_format": "gguf"}, True),
        ({"load_format": "remote_instance"}, True),
        ({"weight_cache_mode": "client"}, True),
        ({}, False),
    ],
)
def test_who_loads_from_disk(info, refused):
    assert bool(why_not_from_disk(info)) == refused


@pytest.mark.parametrize(
    ("url", "host", "refused"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1", False),
        ("http://localhost:30000", "127.0.0.1", False),
        ("http://[::1]:30000", "localhost", False),
        ("http://192.0.2.7:30000", "127.0.0.1", True),
        ("http://192.0.2.7:30000", "localhost", True),
        ("http://192.0.2.7:30000", "::1", True),
        ("http://192.0.2.7:30000", "192.0.2.1", False),
        ("http://engine.invalid:30000", "127.0.0.1", True),
    ],
)
def test_a_loopback_address_is_no_meeting_place_for_another_machine(url, host, refused):
    assert bool(why_unreachable(url, host)) == refused


def test_the_address_is_the_one_from_which_the_engine_is_reached():
    assert local_address("http://127.0.0.1:30000") == "127.0.0.1"
    assert local_address("http://127.0.0.2:30000").startswith("127.")


class Source:
    def named_tensors(self):
        return iter(())

    def save(self, directory: Path) -> None:
        raise AssertionError("no checkpoint is written here")


def transports(kind, tiny_model):
    if kind == "collective":
        return CollectiveTransport(LoopThread(), 1.0)
    return DistributedTransport(Source()) if kind == "distributed" else CheckpointTransport(tiny_model)


UNFIT = {"distributed": {"dp_size": 2}, "collective": {"dp_size": 2}, "disk": {"load_format": "gguf"}}


@pytest.mark.parametrize("kind", UNFIT)
def test_where_no_engine_fits_nobody_is_touched_or_retired(kind, tiny_model, run_async):
    transport = transports(kind, tiny_model)

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for engine in engines:
                engine.info.update(UNFIT[kind])
            with pytest.raises(PublicationError, match="prepare: ") as caught:
                await publish(fleet, transport, "v1")
            assert {e.failed_step for e in caught.value.report.engines} == {"prepare"}
            assert all(not TOUCHED & set(engine.calls) for engine in engines)
            assert len(fleet.routable()) == 2
            assert fleet.version == "v0"

    run_async(scenario())


def test_one_that_doesnt_fit_is_left_behind_and_the_others_go_on(tiny_model, run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            engines[1].info["load_format"] = "gguf"
            report = await publish(fleet, CheckpointTransport(tiny_model), "v1")
            assert (report.state, list(report.unconfirmed)) == ("resumed", ["engine1"])
            assert "load-format gguf" in fleet.retired()["engine1"]
            assert "/pause_generation" not in engines[1].calls
            assert [m.name for m in fleet.routable()] == ["engine0"]

    run_async(scenario())


def test_an_engine_with_made_weights_is_asked_for_a_format_that_loads(tiny_model, run_async):
    bodies = []

    async def scenario():
        async with fake_fleet(1) as (fleet, (engine,)):
            engine.info["load_format"] = "dummy"
            taken = engine.on_update_weights_from_disk

            async def keep(body):
                bodies.append(body)
                return await taken(body)

            engine.on_update_weights_from_disk = keep
            await publish(fleet, CheckpointTransport(tiny_model), "v1")

    run_async(scenario())
    assert [body["load_format"] for body in bodies] == ["auto"]


def test_a_loopback_host_is_refused_before_the_engine_is_asked(monkeypatch, run_async):
    """The engines count as another machine's here: no second one is at hand."""
    monkeypatch.setattr(served, "_is_here", lambda host: False)
    monkeypatch.setattr(served, "is_loopback", lambda host: host == "localhost")

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            transport = DistributedTransport(Source(), host="localhost")
            with pytest.raises(PublicationError, match=r"didn't join the weight-update group: .*localhost"):
                await publish(fleet, transport, "v1")
            assert all(not TOUCHED & set(engine.calls) for engine in engines)
            assert len(fleet.routable()) == 2

    run_async(scenario())


def test_an_engine_that_sits_in_the_rendezvous_is_named_for_it_and_left_alone(run_async):
    async def scenario():
        async with fake_fleet(1, deadlines=Deadlines(1.0, 1.0, 60.0, 1.0, 60.0)) as (fleet, (engine,)):

            async def never(body):
                await asyncio.Event().wait()

            engine.on_init_weights_update_group = never
            with pytest.raises(PublicationError, match=r"prepare: it didn't join the weight-update group"):
                await publish(fleet, DistributedTransport(Source(), connect_s=0.3), "v1")
            assert "didn't join" in fleet.retired()["engine0"]  # its scheduler generates nothing
            assert not (TOUCHED - {"/init_weights_update_group"}) & set(engine.calls)
            assert engine.calls.count("/init_weights_update_group") == 1

    run_async(scenario())


def test_a_refused_join_costs_nobody_a_pause(run_async):
    async def scenario():
        async with fake_fleet(1, deadlines=FAST) as (fleet, (engine,)):

            async def refuse(body):
                return Reply({"success": False, "message": "no such backend"}, 400)

            engine.on_init_weights_update_group = refuse
            with pytest.raises(PublicationError, match=r"didn't join the weight-update group: .*no such backend"):
                await publish(fleet, DistributedTransport(Source()), "v1")
            assert "/pause_generation" not in engine.calls
            assert len(fleet.routable()) == 1

    run_async(scenario())
