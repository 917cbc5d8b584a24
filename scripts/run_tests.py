"""Run the tests in two pytest processes at once, on the interpreter that runs this.

    python scripts/run_tests.py [PYTEST ARGUMENTS]

The tests with engines run one after the other and are shown as they run. All others, which mostly wait, run next to
them and are shown when both have ended. Both get the arguments. Ctrl-C or SIGTERM interrupts both, and so does the end
of this process by whatever means.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

PYTEST = (sys.executable, "-m", "pytest")
NO_TESTS = 5  # pytest's exit status where nothing was selected
INTERRUPTED_S = 60.0  # in which an interrupted pytest ends its engines and servers
PR_SET_PDEATHSIG = 1


def start(part: str, arguments: Sequence[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        [*PYTEST, "--part", part, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT),
    )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt those that still run, and kill what doesn't heed it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def joined(statuses: Sequence[int]) -> int:
    """The first failure; a part without tests is none unless the other one has none either."""
    failures = [status for status in statuses if status not in (0, NO_TESTS)]
    return failures[0] if failures else min(statuses)


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile() as log:
        parts = [start("rest", arguments, log), start("engine", arguments, None)]
        try:
            statuses = [part.wait() for part in reversed(parts)]
        except KeyboardInterrupt:
            end(parts)
            statuses = [128 + signal.SIGINT] * 2
        log.seek(0)
        print("\nThe tests without an engine, which ran at the same time:\n", flush=True)
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    return joined(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
