"""Fixtures for all tests. Engine tests share session-wide real engines: one takes half a minute to start."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("no time is asserted", deadline=None)
settings.load_profile("no time is asserted")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a serving machine the tests take no device memory

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without SGLang the engine tests can't run; say so instead of failing on an import."""
    if importlib.util.find_spec("sglang") is None:
        reason = pytest.mark.skip(reason="sglang is not installed; make env installs it")
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(reason)


@pytest.fixture
def run_async() -> Callable[[Awaitable[Any]], Any]:
    """Run a coroutine to its end, bounded."""

    def run(work: Awaitable[Any], timeout: float = 60.0) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, timeout)

        return asyncio.run(bounded())

    return run


@pytest.fixture(scope="session")
def slime_src() -> Path:
    """The slime checkout that SLIME_SRC names."""
    named = os.environ.get("SLIME_SRC")
    if not named:
        pytest.skip("SLIME_SRC names no slime checkout")
    return Path(named)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense model with random weights."""
    from slime_backend.simulation.models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0, max_positions=32768)


@pytest.fixture(scope="session")
def tiny_model_b(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes with other weights: what a publication moves to."""
    from slime_backend.simulation.models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "v1", seed=1, max_positions=32768)


@pytest.fixture(scope="session")
def models(tiny_model: Path, tiny_model_b: Path) -> dict[str, Any]:
    """Both checkpoints in Hugging Face's implementation, to score an engine's answers with."""
    from slime_backend.simulation.models import load_model

    return {"a": load_model(tiny_model), "b": load_model(tiny_model_b)}


@pytest.fixture(scope="session")
def sources(models: dict[str, Any], tiny_model: Path, tiny_model_b: Path) -> dict[str, Any]:
    """The same as sources of weights."""
    from slime_backend.weight_sources.torch_module import TorchModuleSource

    return {"a": TorchModuleSource(models["a"], tiny_model), "b": TorchModuleSource(models["b"], tiny_model_b)}


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One real SGLang engine with the radix cache on and all hooks; a `LocalEngine`."""
    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines

    log = tmp_path_factory.mktemp("engine") / "engine.log"
    local = LocalEngine(EngineSettings(model=str(tiny_model), max_total_tokens=40000, hooks=RUN_HOOKS), log_path=log)
    with running_engines([local]):
        yield local
