"""Runs of the local trainer on one fake engine: what several test modules configure and start alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slime_backend.config import EnginesConfig, RunConfig
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import Policy
from slime_backend.simulation.fake_engine import FakeEngine

STEPS = 4


@asynccontextmanager
async def fake_fleet(
    config: EnginesConfig, policy: Policy, model: Path, version: str, log_dir: Path, log: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    async with FakeEngine(version=version, token_s=0.004) as engine, EngineClient(engine.url, name="engine0") as client:
        fleet = Fleet(policy, version)
        await admit(fleet, client)
        yield fleet


def config_of(tmp_path: Path, tiny_directory: Path, **settings: Any) -> RunConfig:
    return RunConfig(
        runs_dir=str(tmp_path),
        model=str(tiny_directory),
        disjoint_prefix_sharing="retract",
        steps=STEPS,
        groups_per_step=2,
        samples_per_group=2,
        groups_ahead=2,
        audit_rollouts=0,
        **settings,
    )
