"""Whether the slime that a job would import is one that this package fits, read from its sources before it is imported.

A renamed method would leave ours uncalled and slime's own pause, flush and load run unverified, without a word. So the
job ends first, with what is missing: file, symbol, and what was expected.

    check(checkout.root())          # 0.3 s; raises SlimeMovedError

Besides the symbols, parameters and flags of touched.py it looks at the instance attributes that this package reads and
sets on slime's updaters, and at the calls to engines inside the methods that run with stand-ins for the engines: a call
that no stand-in knows would reach an engine past the transaction.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_backend.errors import ReefError
from slime_backend.slime_hooks.contract import touched
from slime_backend.slime_hooks.contract.symbols import file_of, make_contract
from slime_backend.slime_hooks.contract.touched import UPDATERS

# Class of slime's -> attributes that it sets on itself and that we read or set.
ATTRIBUTES: Mapping[tuple[str, str], tuple[str, ...]] = {
    (f"{UPDATERS}.update_weight_from_distributed", "UpdateWeightFromDistributed"): (
        *("_group_name", "_is_pp_src_rank", "_model_update_groups", "args", "rollout_engines"),
        *("update_weight_metrics", "weight_version"),
    ),
    (f"{UPDATERS}.update_weight_from_tensor", "UpdateWeightFromTensor"): (
        *("_group_name", "_ipc_engine", "_is_distributed_src_rank", "_model_update_groups", "args"),
        *("distributed_rollout_engines", "rollout_engines", "update_weight_metrics", "use_distribute"),
        "weight_version",
    ),
    (f"{UPDATERS}.update_weight_from_disk_delta", "UpdateWeightFromDiskDelta"): ("rollout_engines",),
}
# (module, "Class.method" or function) -> all calls that it makes to engines, `engine.<call>.remote(...)`.
CALLS: Mapping[tuple[str, str], frozenset[str]] = {
    (f"{UPDATERS}.update_weight_from_distributed", "UpdateWeightFromDistributed.update_weights"): frozenset(
        ("pause_generation", "flush_cache", "continue_generation")
    ),
    (f"{UPDATERS}.update_weight_from_tensor", "UpdateWeightFromTensor.update_weights"): frozenset(
        ("pause_generation", "flush_cache", "continue_generation")
    ),
    (f"{UPDATERS}.update_weight_from_tensor", "_send_to_colocated_engine"): frozenset(("update_weights_from_tensor",)),
    (f"{UPDATERS}.update_weight_from_distributed", "post_process_weights"): frozenset(("post_process_weights",)),
}
NAMED = 4  # of what is missing, in the message
KNOWN = "624b824a (2026-08-21); the tag v0.3.1 and slime's image of 2026-08-10 fit too, without the CPU mode"


class SlimeMovedError(ReefError, RuntimeError):
    """slime lacks something that this package changes or calls."""


def check(source: Path, *, cpu: bool) -> None:
    """Raise SlimeMovedError where the checkout `source` lacks something. `cpu`: the job runs in the CPU mode, which
    needs more of it."""
    lines = missing(source, cpu=cpu)
    if lines:
        more = f"; and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        raise SlimeMovedError(
            f"slime in {source} has changed where reef-slime relies on it: {'; '.join(lines[:NAMED])}{more}. Use slime "
            f"at {KNOWN}, or a reef-slime that was written for this one (scripts/make_slime_contract.py lists all)"
        )


def missing(source: Path, *, cpu: bool = True) -> list[str]:
    """What a checkout lacks, one line each: file, symbol, what was expected. Raises ContractError where it is none."""
    lines = touched.missing(make_contract(source, touched.symbols()), cpu=cpu)
    trees = _Trees(source)
    lines += _unbound(trees)
    lines += _attributes(trees)
    lines += _calls(trees)
    return lines


class _Trees:
    """The parsed modules of a checkout, each once."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._known: dict[str, tuple[str, ast.Module] | None] = {}

    def of(self, module: str) -> tuple[str, ast.Module] | None:
        """(file below the checkout, its tree); None where the module is gone, which touched.missing says."""
        if module not in self._known:
            path = file_of(self._source, module)
            if path is None:
                self._known[module] = None
            else:
                self._known[module] = (path.relative_to(self._source).as_posix(), ast.parse(path.read_text()))
        return self._known[module]


def _unbound(trees: _Trees) -> Iterator[str]:
    for module, names in touched.bound_names().items():
        if (found := trees.of(module)) is None:
            continue
        file, tree = found
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        bound = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        yield from (f"{file}: {name}: it isn't imported there any more" for name in names if name not in bound)


def _attributes(trees: _Trees) -> Iterator[str]:
    for (module, name), wanted in ATTRIBUTES.items():
        found = trees.of(module)
        node = found and _definition(found[1], name)
        if found is None or node is None:
            continue
        own = {attribute for base in (*_bases(trees, found[1], node), node) for attribute in _set_on_self(base)}
        yield from (f"{found[0]}: {name}: sets no self.{lost}" for lost in wanted if lost not in own)


def _calls(trees: _Trees) -> Iterator[str]:
    for (module, symbol), expected in CALLS.items():
        found = trees.of(module)
        node = found and _definition(found[1], symbol)
        if found is None or node is None:
            if found is not None:
                yield f"{found[0]}: {symbol}: it is gone"
            continue
        made = frozenset(_remote_calls(node))
        if made != expected:
            yield f"{found[0]}: {symbol}: calls {_listed(made)} of an engine, and {_listed(expected)} was expected"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _definition(tree: ast.AST, symbol: str) -> Any:
    """The class or function `symbol`, or a method "Class.method", of a module or a class."""
    name, _, rest = symbol.partition(".")
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in getattr(tree, "body", ()):
        if isinstance(node, kinds) and node.name == name:
            return _definition(node, rest) if rest else node
    return None


def _bases(trees: _Trees, tree: ast.Module, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The classes of slime's that a class is derived from, where they can be found by their imports."""
    for base in node.bases:
        name = ast.unparse(base)
        local = _definition(tree, name)
        if isinstance(local, ast.ClassDef):
            yield local
            continue
        for imported in ast.walk(tree):
            if isinstance(imported, ast.ImportFrom) and name in {
                alias.asname or alias.name for alias in imported.names
            }:
                for module in (imported.module or "", f"{UPDATERS}.{imported.module or ''}"):
                    found = trees.of(module) if module else None
                    there = found and _definition(found[1], name)
                    if isinstance(there, ast.ClassDef):
                        yield there


def _set_on_self(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets:
            for name in ast.walk(target) if isinstance(target, ast.AST) else ():
                if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
                    yield name.attr


def _remote_calls(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        function = call.func if isinstance(call, ast.Call) else None
        if (
            isinstance(function, ast.Attribute)
            and function.attr == "remote"
            and isinstance(function.value, ast.Attribute)
        ):
            yield function.value.attr
