"""Engines and models of these tests. One engine runs at a time: each module starts its own and stops it at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slime_backend.engine_process import EngineSettings, LocalEngine, running_engines
from tests import tensor_parallel
from tests.engine_plugin.checks import reset
from tests.engine_plugin.engine_api import Api, Serve
from tests.engine_plugin.scoped import HOOKS, KINDS, RUNNING, STRICT, Kind, Scoped
from tests.engine_plugin.tiny_models import Reference, write_checkpoints


@pytest.fixture(scope="session")
def dense_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_checkpoints(tmp_path_factory.mktemp("dense"), hybrid=False)


@pytest.fixture(scope="session")
def hybrid_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_checkpoints(tmp_path_factory.mktemp("hybrid"), hybrid=True)


@pytest.fixture(scope="session")
def dense_reference(dense_paths: dict[str, str]) -> Reference:
    return Reference(dense_paths)


@pytest.fixture(scope="session")
def hybrid_reference(hybrid_paths: dict[str, str]) -> Reference:
    return Reference(hybrid_paths)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """serve(model, **EngineSettings fields) -> context of a running engine's Api."""

    @contextmanager
    def start(model: str, **settings: Any) -> Iterator[Api]:
        engine = LocalEngine(
            EngineSettings(model=model, **{"max_total_tokens": 40000, "chunked_prefill_size": 512, **settings}),
            log_path=tmp_path_factory.mktemp("engine") / "engine.log",
        )
        with running_engines([engine]):
            yield Api(engine.url)

    return start


@pytest.fixture(scope="module", params=KINDS, ids=str)
def scoped_engine(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Scoped]:
    kind: Kind = request.param
    family = "hybrid" if kind.hybrid else "dense"
    paths = request.getfixturevalue(f"{family}_paths")
    with serve(
        paths["v0"],
        hooks=HOOKS,
        page_size=kind.page,
        overlap_schedule=kind.overlap,
        extra=("--max-running-requests", str(RUNNING), *tensor_parallel.flags(kind.tensor_ranks)),
        environment={
            **STRICT,
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": kind.core,
            **tensor_parallel.environment(kind.tensor_ranks),
        },
    ) as api:
        yield Scoped(kind, api, paths, request.getfixturevalue(f"{family}_reference"))


@pytest.fixture
def scoped(scoped_engine: Scoped) -> Scoped:
    reset(scoped_engine.api, scoped_engine.paths)
    return scoped_engine
