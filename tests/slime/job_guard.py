"""Runs one command and ends every process that came of it, also those that left its group or outlived their parent.

    python job_guard.py COMMAND...

A slime job is a tree of strangers: Ray's daemons and workers, engines with servers of their own, a router. The guard
asks the kernel for every orphan below it (prctl PR_SET_CHILD_SUBREAPER), so that the tree stays a tree. It ends the
tree when the command has ended, on SIGTERM, and when whoever holds its stdin is gone, be it by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.2
END_S = 20.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def parents() -> dict[int, int]:
    """Process id -> parent's, of every process that is not a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = int(parent)
    return found


def below(root: int) -> list[int]:
    """Every living descendant of `root`."""
    of = parents()
    found, grew = {root}, True
    while grew:
        new = {pid for pid, parent in of.items() if parent in found} - found
        found, grew = found | new, bool(new)
    return sorted(found - {root})


def end_all() -> list[int]:
    """Kill the tree below this process; return what still lives at the deadline."""
    until = time.monotonic() + END_S
    while left := below(os.getpid()):
        if time.monotonic() > until:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return left


def main(command: list[str]) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop = False

    def on_term(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    while not stop and child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        stop = stop or (bool(readable) and not os.read(sys.stdin.fileno(), 1))
    code = child.poll()
    left = end_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of all that ended below, since all are waited for
    print(f"job_guard: {used.ru_utime + used.ru_stime:.0f} s of CPU time", file=sys.stderr)
    if left:
        print(f"job_guard: {left} could not be ended", file=sys.stderr)
    return 125 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
