"""Calls of a database end: a server that is frozen, or behind a cut cable, answers nothing and closes nothing.

The server's own limits (statement_timeout) help where it runs. Where it doesn't, the waiting thread is woken by closing
its socket, which the driver takes for a lost connection.
"""

from __future__ import annotations

import heapq
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Deadlines:
    """One thread that wakes those who wait for too long.

    with deadlines.limit(connection, 30): connection.execute(...)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: list[tuple[float, int, int]] = []  # (when, number, descriptor)
        self._open: set[int] = set()  # numbers of calls under way
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-deadlines", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, connection: Any, seconds: float) -> Iterator[None]:
        """Let a call on a SQLAlchemy connection take this long; then its socket is shut, and it raises the driver's
        error. SQLite has no socket: its only wait is for a lock, which is bounded by itself."""
        with self.limit_driver(connection.connection.driver_connection, seconds):
            yield

    @contextmanager
    def limit_driver(self, driver: Any, seconds: float) -> Iterator[None]:
        """The same for a connection of the driver's."""
        descriptor = _descriptor(driver)
        if descriptor is None:
            yield
            return
        with self._changed:
            number = next(self._numbers)
            self._open.add(number)
            heapq.heappush(self._ends, (time.monotonic() + seconds, number, descriptor))
            if self._ends[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._open.discard(number)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._open):
                    _, number, descriptor = heapq.heappop(self._ends)
                    if number in self._open:  # the descriptor is the call's own as long as it is under way
                        self._open.discard(number)
                        _shut(descriptor)
                self._changed.wait(self._ends[0][0] - now if self._ends else None)


def _descriptor(driver: Any) -> int | None:
    """The descriptor of a connection's socket; None where the driver has none."""
    with suppress(Exception):  # whatever a driver raises for a connection that is gone
        return int(driver.fileno()) if hasattr(driver, "fileno") else None
    return None


def _shut(descriptor: int) -> None:
    with suppress(OSError):
        copy = socket.socket(fileno=os.dup(descriptor))
        try:
            copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()
