"""Deadlines are configuration: whoever talks to an engine takes them from there."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from reef_service.gateway import join_engines
from slime_backend.cli import app as cli
from slime_backend.cli import engines as cli_engines
from slime_backend.config import ConfigError, make_config
from slime_backend.engine_client import Deadlines
from slime_backend.local_trainer import local_fleet
from slime_backend.policy import decide
from slime_backend.simulation.fake_engine import FakeEngine

GIVEN = {
    "deadline_pause_s": 1.0,
    "deadline_flush_s": 2.0,
    "deadline_load_s": 3.0,
    "deadline_control_s": 4.0,
    "deadline_generate_s": 5.0,
}
ASKED = Deadlines(pause=1.0, flush=2.0, load=3.0, control=4.0, generate=5.0)


def test_the_defaults_are_the_clients_own():
    assert make_config({}, "x").deadlines == Deadlines()


@pytest.mark.parametrize("key", [*GIVEN, "engine_wait_s"])
def test_a_deadline_must_lie_in_the_future(key):
    with pytest.raises(ConfigError, match=f"{key}=0"):
        make_config({key: 0}, "x")


def test_train_and_up_pass_them_on(run_async):
    config = make_config({**GIVEN, "engine_wait_s": 6.0, "disjoint_prefix_sharing": "retract"}, "x")

    class Started:
        """A LocalEngine that runs already."""

        log_path = "nowhere"

        def __init__(self, fake):
            self.url, self.name = fake.url, "engine0"

        def check(self): ...

        start = stop = check

        def wait_ready(self, deadline_s): ...

    async def scenario():
        async with (
            FakeEngine() as fake,
            local_fleet.started_fleet([Started(fake)], config, "v0", lambda text: None) as fleet,
        ):
            return [m.client.deadlines for m in fleet.members.values()], fleet.wait_s

    assert run_async(scenario()) == ([ASKED], 6.0)


def test_serve_passes_them_on(run_async):
    async def scenario():
        clients = []
        async with FakeEngine() as fake:
            fleet = await join_engines(decide("disjoint", "retract"), [fake.url], clients, deadlines=ASKED, wait_s=6.0)
            await asyncio.gather(*(client.close() for client in clients))
            return clients[0].deadlines, fleet.wait_s

    assert run_async(scenario()) == (ASKED, 6.0)


def test_publish_passes_them_on(monkeypatch, tmp_path):
    seen = []

    async def publish_checkpoint(policy, urls, checkpoint, version, allow, deadlines, **checks):
        seen.append(deadlines)
        raise OSError("far enough")

    monkeypatch.setattr(cli_engines, "publish_checkpoint", publish_checkpoint)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in GIVEN.items() if "generate" not in key]
    CliRunner().invoke(
        cli.app, ["publish", "--engine", "http://x", "--checkpoint", str(tmp_path), "--version", "v1", *options]
    )
    assert seen == [Deadlines(1.0, 2.0, 3.0, 4.0)]
