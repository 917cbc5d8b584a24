"""The import contract: arrows point down the layout of docs/architecture.md, and no two packages import each other."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top to the bottom. Each name is a package, or a module that lies loose in `slime_backend`. Those of one floor
# don't import each other; each may import whatever lies below.
FLOORS = [
    "cli",
    "slime_hooks",
    "slime_hooks.weights",
    "slime_hooks.rollouts slime_hooks.engines slime_hooks.contract bench",
    "arguments",
    "local_trainer",
    "cpu config",
    "planner",
    "tracking",
    "report",
    "audit",
    "ledger",
    "simulation",
    "provenance publication",
    "transports",
    "fleet weight_sources",
    "engine_client engine_process",
    "evidence engine_plugin run_files",
    "policy wire event_loop import_hooks command_line",
    "errors",
]
LOOSE = {"policy", "wire", "evidence", "arguments", "errors", "import_hooks", "event_loop", "command_line"}
FLOOR = {f"slime_backend.{name}": number for number, names in enumerate(FLOORS) for name in names.split()}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of the two packages below `root`."""
    found = {}
    for path in [*root.glob("slime_backend/**/*.py"), *root.glob("reef_service/**/*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module


def room(module: str, known: Mapping[str, Path]) -> str:
    """The package that holds a module; the module itself where it lies loose at the top."""
    parent = module.rpartition(".")[0]
    loose = parent in ("slime_backend", "reef_service")
    return module if loose or known[module].name == "__init__.py" else parent


def arrows(root: Path) -> dict[tuple[str, str], str]:
    """(room, imported room) -> one import that makes this arrow. The two tops, which hold a version, don't count."""
    known = modules(root)
    found = {}
    for module, path in known.items():
        for other in imported(path.read_text(), known):
            ends = room(module, known), room(other, known)
            if ends[0] != ends[1] and other not in ("slime_backend", "reef_service"):
                found.setdefault(ends, f"{module} imports {other}")
    return found


def wrong_arrows(root: Path) -> list[str]:
    """Imports inside `slime_backend` that don't lead to a lower floor, and those of the gateway from below it."""
    wrong = []
    for (above, below), example in arrows(root).items():
        if above.startswith("reef_service"):
            continue
        if below.startswith("reef_service"):
            wrong += [] if above == "slime_backend.cli" else [example]
        elif above not in FLOOR or below not in FLOOR:
            wrong.append(f"{example}: one of them has no floor")
        elif FLOOR[above] >= FLOOR[below]:
            wrong.append(example)
    return wrong


def circles(root: Path) -> list[str]:
    graph = graphlib.TopologicalSorter[str]()
    for above, below in arrows(root):
        graph.add(above, below)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_import_points_down():
    assert wrong_arrows(ROOT) == []


def test_no_two_rooms_import_each_other():
    assert circles(ROOT) == []


def test_few_modules_lie_loose():
    loose = {path.stem for path in (ROOT / "slime_backend").glob("*.py")} - {"__init__"}
    assert loose == LOOSE


@pytest.mark.parametrize(
    ("file", "line", "seen"),
    [
        (
            "slime_backend/policy.py",
            "from slime_backend.fleet.membership import Fleet",
            "slime_backend.policy imports slime_backend.fleet.membership",
        ),
        (
            "slime_backend/ledger/files.py",
            "def f():\n    import slime_backend.audit.audit",
            "imports slime_backend.audit.audit",
        ),
        ("slime_backend/fleet/doctor.py", "from reef_service.store import store", "imports reef_service.store.store"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, line, seen):
    for path in modules(ROOT).values():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text() + (f"\n{line}\n" if str(path).endswith(file) else ""))
    assert [example for example in wrong_arrows(tmp_path) if seen in example]


def test_a_planted_circle_is_found(tmp_path):
    for name, source in {"api": "from reef_service.store import b", "store": "from reef_service.api import b"}.items():
        directory = tmp_path / "reef_service" / name
        directory.mkdir(parents=True)
        (directory / "__init__.py").touch()
        (directory / "b.py").write_text(source)
    assert len(circles(tmp_path)) == 3
