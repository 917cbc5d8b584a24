"""`fake_engines` runs fake engines in a separate process, so that they take no time of what is measured or tested."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from slime_backend import event_loop
from slime_backend.simulation.fake_engine import FakeEngine, Fault

READY_S = 120.0
END_S = 10.0


@contextmanager
def fake_engines(
    count: int, *, faults: Mapping[str, Sequence[Fault]] | None = None, **options: Any
) -> Iterator[list[str]]:
    """Yield the URLs of `count` fake engines, ended with the block. `options`: FakeEngine's, if they can be pickled.

    `faults`: path -> what happens to its next calls, on each of them. The process ends by itself when this one does.
    Raises TimeoutError if they don't listen within two minutes.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy this process's event loop
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(count, dict(faults or {}), options, theirs), daemon=True)
    server.start()
    theirs.close()  # so that the other side reads end-of-file when ours is gone
    try:
        if not ours.poll(READY_S):
            raise TimeoutError(f"{count} fake engines didn't listen within {READY_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        server.join(END_S)
        if server.is_alive():
            server.kill()
            server.join()


def _serve(count: int, faults: Mapping[str, Sequence[Fault]], options: Mapping[str, Any], parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the parent, which ends us

    async def run() -> None:
        engines = [FakeEngine(**options) for _ in range(count)]
        for engine in engines:
            for path, kinds in faults.items():
                engine.faults[path] = list(kinds)
            await engine.start()
        parent.send([engine.url for engine in engines])
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent.fileno(), gone.set)
        await gone.wait()

    event_loop.run(run())
