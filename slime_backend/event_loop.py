"""The event loop of a controller: uvloop where it is installed (SGLang brings it), asyncio's own elsewhere.

A barrier over hundreds of engines is many short calls at once, and a call costs a third less on uvloop.
`run` for a program of its own, `run_until_signal` for a command, `LoopThread` inside one that isn't asynchronous.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
ASK_S = 60.0  # for the loop to come to a question of another thread; none of its steps takes long


def run(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(work)


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """As `run`, of a command: the first SIGINT or SIGTERM cancels `work`, so that its own clean-up runs; further ones
    do nothing, since every wait of a clean-up has a deadline.

    Raises KeyboardInterrupt then.
    """

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        cancel = functools.cache(task.cancel)
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, cancel)
        return await work

    try:
        return run(supervised())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class LoopThread:
    """An event loop in a thread, for synchronous code that publishes (a trainer's process).

    loop = LoopThread()
    future = loop.submit(client.pause("retract"))
    ...
    future.result()
    loop.stop()
    """

    def __init__(self) -> None:
        self._loop = (_factory() or asyncio.new_event_loop)()
        # A daemon: a trainer that ends, for whatever reason, doesn't wait for it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="reef-slime-publisher", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the loop's thread, soon."""
        self._loop.call_soon_threadsafe(function, *args)

    def ask(self, function: Callable[[], T], deadline_s: float = ASK_S) -> T:
        """What `function()` returns on the loop's thread, which alone may look at what the loop changes.

        Raises what it raises, and TimeoutError where the loop doesn't come to it.
        """
        if threading.current_thread() is self._thread:
            return function()

        async def answer() -> T:
            return function()

        return self.submit(answer()).result(deadline_s)

    def stop(self) -> None:
        """Stop the loop. What is still under way on it stays unfinished."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
