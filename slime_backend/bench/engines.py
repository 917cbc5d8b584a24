"""Engines of one model that differ in their hooks, for a bench to compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import EngineSettings, LocalEngine

DEADLINE_S = 120.0  # of one answer


@asynccontextmanager
async def running_engines(
    model: Path, logs: Path, name: str, hooks: Mapping[str, Sequence[str]], **settings: Any
) -> AsyncIterator[dict[str, EngineClient]]:
    """Side -> client of an engine with these hooks; started side by side and ended whatever happens.

    Raises EngineStartError.
    """
    engines = {
        side: LocalEngine(
            EngineSettings(model=str(model), hooks=names, **settings),
            log_path=logs / f"{name}-{side}.log",
            name=f"{name}-{side}",
        )
        for side, names in hooks.items()
    }
    clients: dict[str, EngineClient] = {}
    try:
        for engine in engines.values():
            engine.start()
        await asyncio.gather(*(asyncio.to_thread(engine.wait_ready) for engine in engines.values()))
        for side, engine in engines.items():
            clients[side] = EngineClient(engine.url, name=engine.name, deadlines=Deadlines(generate=DEADLINE_S))
        yield clients
    finally:
        for client in clients.values():
            await client.close()
        await asyncio.shield(asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines.values())))
