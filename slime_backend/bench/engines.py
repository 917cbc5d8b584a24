"""`running_engines` starts engines of one model that differ in their hooks, for a bench to compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import EngineSettings, LocalEngine

# Engines that outnumber the cores delay each other by seconds, which the benches measure.
DEADLINES = Deadlines(pause=120, flush=120, control=120, generate=120)
# An engine that starts counts what others allocate meanwhile as its own, so of eight at once one finds too little left
# for its KV (SGLang 0.5.23, --mem-fraction-static).
START_AT_ONCE = 2


@asynccontextmanager
async def running_engines(
    model: Path, logs: Path, name: str, hooks: Mapping[str, Sequence[str]], **settings: Any
) -> AsyncIterator[dict[str, EngineClient]]:
    """Yield for each side the client of an engine with its hooks; two start at a time, and all are ended at the end.

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
