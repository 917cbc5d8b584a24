"""How tests import: `from tests.x import y`, from modules that hold no tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FILES = sorted(TESTS.rglob("*.py"))
HELPERS = {path.stem for path in FILES} - {"__init__", "conftest"}


def imported(source: str) -> Iterator[str]:
    """Each module or name that is imported, in full; a relative one with its dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def faults(source: str) -> list[str]:
    found = []
    for name in imported(source):
        parts = name.split(".")
        if name.startswith("."):
            found.append(f"{name}: a relative import")
        elif parts[0] == "tests" and any(part.startswith("test_") for part in parts[1:]):
            found.append(f"{name}: a test module is no library")
        elif len(parts) == 1 and name in HELPERS:
            found.append(f"{name}: give its package")
    return found


def test_no_test_imports_another_one() -> None:
    found = {str(path.relative_to(TESTS)): faults(path.read_text()) for path in FILES}
    assert {path: why for path, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from .harness import Client",
        "from tests.test_cli import run",
        "from tests import test_cli",
        "import tests.slime_hooks.test_updaters as stubs",
        "from engine_api import Api",
        "import tree_only",
    ],
)
def test_control_what_is_refused(line: str) -> None:
    assert faults(line)
