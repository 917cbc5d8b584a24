"""`scripts/run_tests.py`, which runs both parts of the tests at once: on a made-up project of a few tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import below_with, wait_gone
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "run_tests.py"
TESTS = """
import os, pathlib, time
import pytest

@pytest.mark.engine
def test_engine():
    assert os.environ.get("FAILS") != "engine"

@pytest.fixture
def server():
    yield
    pathlib.Path("torn-down").touch()

def test_rest(server):
    assert os.environ.get("FAILS") != "rest"
    if "WAITS" in os.environ:
        pathlib.Path("waiting").touch()
        time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text("from tests.parts import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = engine: needs one\n")
    (tmp_path / "test_made.py").write_text(TESTS)
    return tmp_path


def start(project: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "-q", "-p", "no:cacheprovider", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "fails", "status"),
    [
        ([], "", 0),
        ([], "engine", 1),
        ([], "rest", 1),
        (["-k", "test_rest"], "", 0),
        (["-m", "engine"], "", 0),
        (["-k", "nothing"], "", 5),
    ],
)
def test_both_parts_count_and_one_may_have_no_tests(
    project: Path, arguments: list[str], fails: str, status: int
) -> None:
    process = start(project, *arguments, FAILS=fails)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    if not arguments:
        assert output.count("1 passed, 1 deselected") == (1 if fails else 2)
    if fails:
        assert f"FAILED test_made.py::test_{fails}" in output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_both_parts_end_and_tear_down(project: Path, how: signal.Signals) -> None:
    process = start(project, WAITS="1")
    try:
        wait_until((project / "waiting").exists, "the test without an engine runs")
        children = [child.pid for child in below_with("pytest", root=process.pid)]
        assert children
    finally:
        process.send_signal(how)
        process.communicate(timeout=300)
    assert wait_gone(children) == []
    assert (project / "torn-down").exists()
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + signal.SIGINT)
