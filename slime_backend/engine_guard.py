"""Runs one command in its own process group and ends the whole group as soon as the controller is gone.

    python -S engine_guard.py COMMAND...        (run as a file: it needs the standard library only)

The controller keeps the write end of the guard's stdin open and never writes. A controller that exits, or is killed
with SIGKILL, closes it; the guard reads end-of-file and ends the engine, its schedulers and its detokenizer. The
guard's own sudden death is covered by the kernel: the command asks to be killed when its parent dies
(prctl PR_SET_PDEATHSIG), and SGLang's own children ask the same of theirs.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0  # SIGTERM first, so that shared memory and sockets are released; SIGKILL after this
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(pgid: int, signum: int) -> bool:
    """True while the group still has a member."""
    try:
        os.killpg(pgid, signum)
    except ProcessLookupError:
        return False
    return True


def end_group(pgid: int, grace_s: float = GRACE_S) -> None:
    """End every process of the group and return once none is left."""
    deadline = time.monotonic() + grace_s
    _signal_group(pgid, signal.SIGTERM)
    while _signal_group(pgid, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(pgid, signal.SIGKILL)


def main(command: list[str]) -> int:
    # The terminal's Ctrl-C belongs to the controller, which ends the engines when it is done with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_parent)
    stop = False

    def on_term(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_term)
    while not stop and child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            stop = True
    if child.poll() is None:
        # Reap while the group ends: an unreaped leader would keep the group alive for ever.
        _signal_group(child.pid, signal.SIGTERM)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    end_group(child.pid, grace_s=1.0 if child.poll() is not None else 0.0)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
