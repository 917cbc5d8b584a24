"""Fake engines in a process of their own, where they take no time of whoever is measured or tested."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from slime_backend import event_loop
from slime_backend.simulation.fake_engine import FakeEngine

READY_S = 60.0


@contextmanager
def fake_engines(count: int, **options: Any) -> Iterator[list[str]]:
    """Their base URLs; `options` are FakeEngine's, and can be pickled.

    They end with the block, or with this process.
    """
    start = multiprocessing.get_context("spawn")  # a fork would keep our end of the pipe open
    ours, theirs = start.Pipe()
    process = start.Process(target=_serve, args=(theirs, count, options), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY_S):
            raise TimeoutError(f"the fake engines are not ready after {READY_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.join(READY_S)


def _serve(parent: Connection, count: int, options: dict[str, Any]) -> None:
    async def run() -> None:
        engines = [FakeEngine(**options) for _ in range(count)]
        for engine in engines:
            await engine.start()
        parent.send([engine.url for engine in engines])
        await asyncio.to_thread(parent.poll, None)  # returns when the other end is closed, by whatever
        for engine in engines:
            await engine.stop()

    event_loop.run(run())
