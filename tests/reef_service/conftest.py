"""The store's tests run on SQLite and on a real PostgreSQL server, which is started here in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reef_service.postgres_server import PostgresServer

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


@contextmanager
def _postgres_server(name: str) -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="psycopg is not installed; pip install 'reef-slime[postgres]'")
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("no PostgreSQL server here; apt-get install postgresql")
    # Readable for the server's user, whoever runs the tests.
    server = PostgresServer(binaries, Path("/tmp") / f"reef-{name}-{os.getpid()}")
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of an empty PostgreSQL server on a loopback port."""
    with _postgres_server("postgres") as server:
        yield server.url


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server for one test, which may kill it."""
    with _postgres_server("own-postgres") as server:
        yield server


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
