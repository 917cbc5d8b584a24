"""The store's tests run on SQLite and on a real PostgreSQL server, which is started here in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_backend.engine_process import free_port

NEEDED = (
    "fastapi",
    "fastapi_offline",
    "httptools",
    "jinja2",
    "orjson",
    "prometheus_client",
    "sqlalchemy",
    "tokenizers",
    "uvicorn",
)
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
# Without them no file here can be imported; test_installed.py says so.
HERE = Path(__file__).parent
collect_ignore = [p.name for p in HERE.glob("test_*.py") if p.name != "test_installed.py"] if MISSING else []


def _postgres_bin() -> Path | None:
    """The directory of Debian's newest PostgreSQL server, or that of a `postgres` on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("postgres")
    return Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty PostgreSQL server on a loopback port."""
    pytest.importorskip("psycopg", reason="psycopg is not installed; pip install 'reef-slime[postgres]'")
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("no PostgreSQL server here; apt-get install postgresql")
    data = Path("/tmp") / f"reef-postgres-{os.getpid()}"  # readable for the server's user, whoever runs the tests
    user: dict[str, Any] = {}
    if os.getuid() == 0:  # the server refuses to run as root
        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses to run as root and there is no user postgres")
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    data.mkdir(mode=0o700)
    if user:
        os.chown(data, user["user"], user["group"])
    port = free_port()
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data / "db", "-U", "reef", "--auth=trust", "--no-sync", "--encoding=UTF8"],
            check=True, capture_output=True, timeout=120, cwd="/", **user,
        )  # fmt: skip
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data / "db", "-h", "127.0.0.1", "-p", str(port), "-k", data],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **user,
        )  # fmt: skip
        try:
            ready: list[str | Path] = [binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-t", "1"]
            for _ in range(60):
                if subprocess.run(ready, capture_output=True, timeout=30).returncode == 0:
                    break
                assert server.poll() is None, "the PostgreSQL server ended while starting"
            yield f"postgresql+psycopg://reef@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    finally:
        shutil.rmtree(data, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/gateway.sqlite"
    url = request.getfixturevalue("postgres")
    from sqlalchemy import create_engine, text

    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url
