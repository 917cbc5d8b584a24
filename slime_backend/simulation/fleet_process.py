"""Fake engines in a process of their own, so that what is timed is the controller and not them."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from slime_backend import event_loop
from slime_backend.simulation.fake_engine import FakeEngine, Fault

READY_S = 120.0
END_S = 10.0


@contextmanager
def fake_engines(
    count: int, *, latency_s: float = 0.0, token_s: float = 60.0, faults: Mapping[str, Sequence[Fault]] | None = None
) -> Iterator[list[str]]:
    """The URLs of `count` fake engines that answer each call after `latency_s`; ended with the block.

    `faults`: path -> what happens to its next calls, on each of them. The process ends by itself when this one does.
    Raises TimeoutError if they don't listen within two minutes.
    """
    context = multiprocessing.get_context("spawn")  # a fork would take this process's event loop along
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(count, latency_s, token_s, dict(faults or {}), theirs), daemon=True)
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


def _serve(
    count: int, latency_s: float, token_s: float, faults: Mapping[str, Sequence[Fault]], parent: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C belongs to the parent, which ends us

    async def run() -> None:
        engines = [FakeEngine(latency_s=latency_s, token_s=token_s) for _ in range(count)]
        for engine in engines:
            for path, kinds in faults.items():
                engine.faults[path] = list(kinds)
            await engine.start()
        parent.send([engine.url for engine in engines])
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent.fileno(), gone.set)
        await gone.wait()

    event_loop.run(run())
