"""The guard of slime jobs, on processes that behave as Ray's do: leave the group, outlive their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.slime import job_guard
from tests.slime.jobs import TIMED_OUT, run_job

# Prints its own id and that of a grandchild in a session of its own, whose parent ends at once.
STRANGER = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    sys.stdout.write(f"{os.getpid()}\n")  # in one piece: two processes write here
    sys.stdout.flush()
    time.sleep(600)
sys.stdout.write(f"{os.getpid()}\n")  # in one piece: two processes write here
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def guarded():
    """`guarded(seconds)`: the guard of a STRANGER, and both processes' ids."""
    started = []

    def start(seconds: float) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, job_guard.__file__, sys.executable, "-c", STRANGER, str(seconds)]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(guard)
        assert guard.stdout is not None
        return guard, [int(guard.stdout.readline()) for _ in range(2)]

    yield start
    for guard in started:
        guard.kill()
        guard.wait()
        for pipe in (guard.stdin, guard.stdout):
            pipe.close()


def gone(ids: list[int], within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while set(ids) & set(job_guard.parents()):
        if time.monotonic() > until:
            for pid in ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def test_what_outlives_the_command_is_ended(guarded):
    guard, ids = guarded(0.2)
    assert guard.wait(30) == 0
    assert gone(ids)


def test_the_tree_ends_with_whoever_holds_the_guards_stdin(guarded):
    guard, ids = guarded(600)
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(30) == 125
    assert gone(ids)


def test_the_tree_ends_on_sigterm(guarded):
    guard, ids = guarded(600)
    guard.terminate()
    assert guard.wait(30) == 125
    assert gone(ids)


def test_without_the_guard_the_stranger_lives_on():
    process = subprocess.Popen([sys.executable, "-c", STRANGER, "600"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()
    ids.remove(process.pid)
    assert not gone(ids, within_s=1.0)


def test_a_job_that_hangs_is_ended_at_its_deadline(tmp_path):
    (tmp_path / "hang.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    run = run_job("hang", [], tmp_path, deadline_s=5.0, environment=environment)
    assert run.returncode == TIMED_OUT
    assert run.log.splitlines()[0] == "here"
