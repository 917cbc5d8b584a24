"""`reef-slime serve` as a process of its own, to be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from slime_backend.engine_process import free_port
from tests.reef_service.harness import make_model


class GatewayProcess:
    """One gateway after the other, on one port and one store."""

    def __init__(self, directory: Path, engines: list[str], *settings: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.port = directory, free_port()
        self.run_directory = directory / "runs" / "run"
        self.url = f"http://127.0.0.1:{self.port}"
        config = directory / "gateway.yaml"
        config.write_text("disjoint_prefix_sharing: retract\ngateway: {}\n")
        values = {
            "model": make_model(directory / "model"),
            "runs_dir": directory / "runs",
            "gateway.port": self.port,
        }
        self.command = [sys.executable, "-m", "slime_backend.cli", "serve", str(config), "--json"]
        for name, value in values.items():
            self.command += ["--set", f"{name}={value}"]
        for setting in settings:
            self.command += ["--set", setting]
        self.engines(*engines)
        self.process: subprocess.Popen[str] | None = None

    def engines(self, *urls: str) -> None:
        """Whom it is started for."""
        self.command += ["--set", f"gateway.engines={json.dumps(urls)}"]

    def start(self) -> None:
        """Return once it is ready."""
        with (self.directory / "gateway.log").open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ, start_new_session=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.directory / "gateway.log").read_text()[-2000:]
        assert json.loads(line)["gateway"] == self.url

    def end(self, signum: int = signal.SIGTERM) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(signum)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code

    @property
    def rss_mib(self) -> float:
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
