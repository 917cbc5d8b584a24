"""Threads for what takes long of one request, so that everybody else's go on meanwhile. What runs here either lets go
of the interpreter while it works (the tokenizer) or does it in pieces that take milliseconds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slime_backend.errors import ReefError

T = TypeVar("T")
LARGE = 16_384  # bytes or characters: what is smaller takes less time than to hand it over
THREADS = 2  # each may hold a prompt's tokens several times over


class GivenUp(ReefError):
    """Nobody waits for the work any more."""


class Workers:
    """`run` from the event loop. Work that is given up ends at its next `check`, or never begins."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reef-large")

    async def run(self, work: Callable[[Callable[[], None]], T]) -> T:
        """The result of `work(check)`; `check()` raises where the caller has been cancelled."""
        given_up = threading.Event()

        def check() -> None:
            if given_up.is_set():
                raise GivenUp

        try:
            return await asyncio.wrap_future(self._pool.submit(work, check))
        except asyncio.CancelledError:
            given_up.set()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
