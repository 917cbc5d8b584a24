"""A command that a message prints must run when it is pasted into another shell, wherever one stands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend import command_line


def run_pasted(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PATH")}
    environment = {**bare, "PATH": "/usr/bin:/bin"}
    return subprocess.run(line, shell=True, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_printed_command_runs_from_anywhere(tmp_path):
    done = run_pasted(command_line.command("audit", "--help"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "audit" in done.stdout
    assert run_pasted("reef-slime audit --help", tmp_path).returncode == 127  # the control: the bare name


def environment_with(tmp_path, monkeypatch, *, script: bool, on_path: bool, installed: bool) -> None:
    """A Python in a directory of its own, with what stands beside it."""
    (tmp_path / "bin").mkdir()
    if script:
        (tmp_path / "bin" / "reef-slime").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reef-slime").touch(0o755)  # another environment's
    monkeypatch.setenv("PATH", str(tmp_path / "bin" if on_path else elsewhere))
    monkeypatch.setattr(command_line, "_found_without_pythonpath", lambda python: installed)


@pytest.mark.parametrize(
    ("script", "on_path", "installed", "start"),
    [
        (True, True, True, "reef-slime"),
        (True, False, True, "{bin}/reef-slime"),
        (False, False, True, "{bin}/python -m slime_backend.cli"),
        (True, True, False, "env PYTHONPATH={root} {bin}/python -m slime_backend.cli"),  # it leads to another checkout
        (False, False, False, "env PYTHONPATH={root} {bin}/python -m slime_backend.cli"),
    ],
)
def test_the_shortest_form_that_works(tmp_path, monkeypatch, script, on_path, installed, start):
    environment_with(tmp_path, monkeypatch, script=script, on_path=on_path, installed=installed)
    start = start.format(bin=tmp_path / "bin", root=command_line.ROOT)
    assert command_line.command("audit", "runs/a b") == f"{start} audit 'runs/a b'"
    assert shlex.split(command_line.command("audit", "runs/a b"))[-1] == "runs/a b"
