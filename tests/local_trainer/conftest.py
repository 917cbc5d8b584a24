"""Tiny models on disk, made once per test session, and a sampler that stands in for an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_backend.simulation import models


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_tiny_model(tmp_path_factory.mktemp("models") / "dense", seed=1)


@pytest.fixture(scope="session")
def hybrid_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", hybrid=True, seed=1)


@pytest.fixture
def tiny(tiny_directory: Path) -> Any:
    return models.load_model(tiny_directory)


@pytest.fixture(params=["dense", "hybrid"])
def either_model(request: pytest.FixtureRequest, tiny_directory: Path, hybrid_directory: Path) -> Any:
    return models.load_model(tiny_directory if request.param == "dense" else hybrid_directory)


@pytest.fixture
def token_ids() -> Callable[[int], list[int]]:
    """`token_ids(n)`: n random byte tokens, reproducible within a test."""
    rng = random.Random(7)
    return lambda n: [rng.randrange(256) for _ in range(n)]
