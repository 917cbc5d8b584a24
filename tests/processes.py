"""Which processes run. Each may end between two looks, which is no failure of the test that looks."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


def is_running(pid: int) -> bool:
    """Whether a process still runs; a zombie doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    """The pids that still run after `seconds`."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def below_with(*words: str, root: int | None = None) -> list[psutil.Process]:
    """The processes below this one, or below the process `root`, whose command lines hold every one of `words`."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            found += [process] if all(word in command for word in words) else []
    return found
