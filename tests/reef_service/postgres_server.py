"""A real PostgreSQL server for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_backend.engine_process import free_port


def processes(server: int) -> list[int]:
    """The process ids of a server, its own first."""
    return [server, *(child.pid for child in psutil.Process(server).children(recursive=True))]


class PostgresServer:
    """A PostgreSQL server on a loopback port, with an empty database, that can be killed and started again."""

    def __init__(self, binaries: Path, data: Path) -> None:
        self.binaries, self.data, self.port = binaries, data, free_port()
        self.user: dict[str, Any] = {}
        if os.getuid() == 0:  # the server refuses to run as root
            try:
                owner = pwd.getpwnam("postgres")
            except KeyError:
                pytest.skip("PostgreSQL refuses to run as root and there is no user postgres")
            self.user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self.url = f"postgresql+psycopg://reef@127.0.0.1:{self.port}/postgres"
        self.server: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        self.data.mkdir(mode=0o700)
        if self.user:
            os.chown(self.data, self.user["user"], self.user["group"])
        subprocess.run(
            [self.binaries / "initdb", "-D", self.data / "db", "-U", "reef", "--auth=trust", "--no-sync",
             "--encoding=UTF8"],
            check=True, capture_output=True, timeout=120, cwd="/", **self.user,
        )  # fmt: skip

    def start(self) -> None:
        """Return once it is ready."""
        self.server = subprocess.Popen(
            [self.binaries / "postgres", "-D", self.data / "db", "-h", "127.0.0.1", "-p", str(self.port), "-k",
             self.data],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **self.user,
        )  # fmt: skip
        ready: list[str | Path] = [
            self.binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port), "-t", "1",
        ]  # fmt: skip
        for _ in range(60):
            if subprocess.run(ready, capture_output=True, timeout=30).returncode == 0:
                return
            assert self.server.poll() is None, "the PostgreSQL server ended while starting"

    def kill(self) -> None:
        """All its processes, as the kernel does when memory runs out."""
        assert self.server is not None
        for pid in processes(self.server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.wait(20)

    def remove(self) -> None:
        try:
            if self.server is not None and self.server.poll() is None:
                self.server.terminate()
                try:
                    self.server.wait(20)
                except subprocess.TimeoutExpired:
                    self.server.kill()
        finally:
            shutil.rmtree(self.data, ignore_errors=True)
