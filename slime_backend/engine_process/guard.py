"""Runs one command in its own process group and ends the whole group as soon as the controller is gone.

    python -S engine_guard.py COMMAND...        (run as a file: it needs the standard library only)

The controller keeps the write end of the guard's stdin open and never writes. A controller that exits, or is killed
with SIGKILL, closes it; the guard reads end-of-file and ends the engine, its schedulers and its detokenizer. The
guard's own sudden death is covered by the kernel: the command asks to be killed when its parent dies
(prctl PR_SET_PDEATHSIG), and SGLang's own children ask the same of theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.2  # how soon the engine's own end is noticed
STOP_S = 15.0  # a killed engine may take a while to give its memory back
_PR_SET_PDEATHSIG = 1


def start_guarded(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """For the controller: `command` behind a guard, with what it prints in `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-S", __file__, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def end_guarded(guard: subprocess.Popen[bytes]) -> None:
    """For the controller: end the command and all its children; returns when they are gone."""
    if guard.stdin is not None:
        guard.stdin.close()  # the guard reads end-of-file and ends the group
    try:
        guard.wait(STOP_S)
    except subprocess.TimeoutExpired:
        guard.kill()  # the command dies with its guard
        guard.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(pgid: int) -> None:
    """Kill every process of the group.

    At once with SIGKILL: an SGLang server answers SIGTERM by draining requests and dumping diagnostics for ten seconds,
    and ends its own children with SIGKILL too.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


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
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            stop = True
    # Also when the engine ended by itself: its children may have outlived it.
    end_group(child.pid)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
