"""Engines of one model that differ in their hooks, for a bench to compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import EngineSettings, LocalEngine

# Of each call: engines that outnumber the cores keep each other waiting for seconds, which is to be measured.
DEADLINES = Deadlines(pause=120, flush=120, control=120, generate=120)
# An engine takes for its own what others allocate while it starts, and of eight at once one then finds too little left
# for its KV (SGLang 0.5.23, --mem-fraction-static).
START_AT_ONCE = 2


@asynccontextmanager
async def running_engines(
    model: Path, logs: Path, name: str, hooks: Mapping[str, Sequence[str]], **settings: Any
) -> AsyncIterator[dict[str, EngineClient]]:
    """Side -> client of an engine with these hooks; started two at a time and ended whatever happens.

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
        left = list(engines.values())
        while left:
            starting, left = left[:START_AT_ONCE], left[START_AT_ONCE:]
            for engine in starting:
                engine.start()
            await asyncio.gather(*(asyncio.to_thread(engine.wait_ready) for engine in starting))
        for side, engine in engines.items():
            clients[side] = EngineClient(engine.url, name=engine.name, deadlines=DEADLINES)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
        await asyncio.shield(asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines.values())))
