"""`slime_sequence` does what slime 0.3.1 does to its engines at every update, as the peer of a bench.

update_weight_from_distributed.py, `update_weights`: pause on all engines, flush on all engines, the weights, resume on
all engines. The pause has an empty body, so SGLang takes its default mode `abort`, which polls once a second until
nothing runs; a refused flush is sent again after a second, sixty times (sglang_engine.py, `flush_cache`). HTTP 200
counts as done everywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime_backend.bench.rows import BenchError
from slime_backend.engine_client import EngineClient, EngineRefused

Load = Callable[[EngineClient], Awaitable[None]]

FLUSH_RETRY_S = 1.0
FLUSH_TRIES = 60


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop has the times, in ms from the first pause sent, until the caches are flushed and until resumed."""

    flushed_ms: float
    resumed_ms: float


async def slime_sequence(clients: Sequence[EngineClient], load: Load | None = None) -> Stop:
    """Pause, flush, `load` (without it no bytes), resume, each on all engines at once.

    Raises BenchError, EngineError.
    """
    started = time.perf_counter()
    await asyncio.gather(*(client.pause("abort") for client in clients))
    await asyncio.gather(*(_flush(client) for client in clients))
    flushed = time.perf_counter()
    if load is not None:
        await asyncio.gather(*(load(client) for client in clients))
    await asyncio.gather(*(client.resume() for client in clients))
    return Stop(1000 * (flushed - started), 1000 * (time.perf_counter() - started))


async def _flush(client: EngineClient) -> None:
    for _ in range(FLUSH_TRIES):
        try:
            await client.flush()
            return
        except EngineRefused:
            await asyncio.sleep(FLUSH_RETRY_S)
    raise BenchError(f"{client.name} refused to flush {FLUSH_TRIES} times")
