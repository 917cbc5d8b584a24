"""The two parts of the tests, which `make test` runs at once: those that start real engines, and all others."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["engine", "rest"], help="only the tests with engines, or only all others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        wanted = part == "engine"
        other = [item for item in items if (item.get_closest_marker("engine") is not None) != wanted]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]
