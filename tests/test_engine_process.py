"""Starting and stopping: what a user can get wrong, and that no engine outlives its controller.

The guard is tested with small process trees; one test kills the controller of a real SGLang server.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime_backend.engine_process import (
    EngineSettings,
    EngineStartError,
    LocalEngine,
    PortOccupiedError,
    check_port,
    free_port,
)
from slime_backend.engine_process import engine as engine_process
from slime_backend.engine_process import guard as engine_guard
from tests.processes import wait_gone
from tests.waiting import wait_until

# A server that is healthy at once.
HEALTHY = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""

# A stand-in for a server: ignores SIGTERM, has a child of its own, says who they are.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def guarded_tree() -> tuple[subprocess.Popen[str], list[int]]:
    guard = subprocess.Popen(
        [sys.executable, "-S", engine_guard.__file__, sys.executable, "-c", TREE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None
    return guard, [int(p) for p in guard.stdout.readline().split()]


@pytest.mark.parametrize("how", ["stdin closed", "SIGTERM", "SIGKILL of the guard"])
def test_the_guard_ends_the_whole_tree(how):
    guard, pids = guarded_tree()
    assert len(pids) == 2
    assert wait_gone(pids, 0.3) == pids  # it does not end them early
    if how == "stdin closed":
        assert guard.stdin is not None
        guard.stdin.close()
    else:
        guard.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    guard.wait(20)
    # SIGKILL of the guard itself reaches its child through the kernel; SGLang's children ask for the same.
    assert wait_gone(pids[:1] if "guard" in how else pids) == []
    for pid in wait_gone(pids, 0):
        os.kill(pid, signal.SIGKILL)


def test_the_guard_ends_children_that_outlive_their_server():
    script = TREE.replace("time.sleep(600)\n", "") + "sys.exit(7)"
    guard = subprocess.Popen(
        [sys.executable, "-S", engine_guard.__file__, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None
    pids = [int(p) for p in guard.stdout.readline().split()]
    assert guard.wait(20) == 7  # the server's own exit code
    assert wait_gone(pids) == []


def test_a_killed_controller_takes_its_tree_along(tmp_path):
    """kill -9 of the process that holds the guard's stdin."""
    out = tmp_path / "pids"
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-S', {engine_guard.__file__!r}, sys.executable, '-c', {TREE!r}],"
        f" stdin=subprocess.PIPE, stdout=open({str(out)!r}, 'w'), start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: out.exists() and out.read_text().endswith("\n"), "the tree runs")
    pids = [int(p) for p in out.read_text().split()]
    controller.kill()
    controller.wait()
    assert wait_gone(pids) == []


def test_a_missing_model_is_named(tmp_path):
    engine = LocalEngine(EngineSettings(model=str(tmp_path / "none")), log_path=tmp_path / "log", name="engine0")
    with pytest.raises(EngineStartError, match=r"engine0: no model at .*none \(config.json is missing\)"):
        engine.start()


def test_an_occupied_port_is_named(tmp_path, tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = LocalEngine(EngineSettings(model=str(tiny_model), port=port), log_path=tmp_path / "log")
        with pytest.raises(PortOccupiedError, match=f"port {port} .*choose another port"):
            engine.start()
    check_port(port)
    check_port(free_port())


def test_a_port_is_none_that_the_system_gives_to_connections(monkeypatch):
    """An engine binds its port long after it was chosen; a taken one is passed over."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = free_port()
        assert free in engine_process.PORTS
        monkeypatch.setattr(engine_process, "PORTS", range(taken.getsockname()[1], taken.getsockname()[1] + 1))
        assert free_port() != taken.getsockname()[1]


@pytest.mark.engine
def test_an_engine_that_dies_while_starting_says_why(tmp_path, tiny_model):
    settings = EngineSettings(model=str(tiny_model), extra=["--no-such-flag-of-sglang"])
    engine = LocalEngine(settings, log_path=tmp_path / "engine.log", name="engine0")
    try:
        engine.start()
        with pytest.raises(EngineStartError, match=r"engine0: the engine ended while starting: .*no-such-flag.*log: "):
            engine.wait_ready(120)
    finally:
        engine.stop()


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_controller_leaves_no_real_engine_running(tmp_path, tiny_model):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from slime_backend.engine_process.engine import EngineSettings, LocalEngine\n"
        f"engine = LocalEngine(EngineSettings(model={str(tiny_model)!r}, max_total_tokens=8192),"
        f" log_path=Path({str(tmp_path / 'engine.log')!r}))\n"
        "engine.start()\nengine.wait_ready(300)\nprint(engine.pid, flush=True)\ntime.sleep(600)\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        line = controller.stdout.readline()
        assert line.strip(), Path(tmp_path / "engine.log").read_text()[-2000:]
        tree = [p.pid for p in psutil.Process(int(line)).children(recursive=True)] + [int(line)]
    finally:
        controller.kill()
        controller.wait()
    assert len(tree) >= 4  # guard, server, scheduler, detokenizer
    assert wait_gone(tree) == []


def test_an_engine_is_asked_directly_whatever_proxy_is_set(tmp_path, monkeypatch):
    with socket.socket() as nobody:  # bound and not listening: what asks it is refused
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        (tmp_path / "config.json").touch()
        engine = LocalEngine(EngineSettings(model=str(tmp_path)), log_path=tmp_path / "engine.log")
        monkeypatch.setattr(EngineSettings, "command", lambda _, port, __: [sys.executable, "-c", HEALTHY, str(port)])
        try:
            engine.start()
            engine.wait_ready(30.0)
        finally:
            engine.stop()
