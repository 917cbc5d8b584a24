"""slime's symbols and flags as a contract file, read from its source without importing it, and what moved between two.

    {"slime_commit", "slime_version", "sglang_target",
     "modules": {module: {"file", "symbols": {name: function or class}}},
     "cli_flags_slime_utils_arguments_py": {flag: line}}

    function   {"kind", "line", "params", "async" where it is}
    class      {"kind", "line", "bases", "methods": {name: {"line", "params", "async" where it is}}, "fields"}

Parameters are named in order; "*" stands before keyword-only ones, a positional-only mark is left out. A contract lists
the symbols that an earlier one lists, and those in touched.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime_backend.errors import ReefError

FLAGS_KEY = "cli_flags_slime_utils_arguments_py"
FLAGS_FILE = "slime/utils/arguments.py"

Symbols = Mapping[str, Iterable[str]]  # module -> top-level names


class ContractError(ReefError, ValueError):
    """A contract can't be made from this directory; the message says what was looked for and where."""


def symbols_of(contract: Mapping[str, Any]) -> dict[str, list[str]]:
    """The symbols that a contract lists."""
    return {module: list(entry["symbols"]) for module, entry in contract["modules"].items()}


def make_contract(source: Path, wanted: Symbols, *, commit: str | None = None) -> dict[str, Any]:
    """The contract of the slime checkout `source` for the symbols `wanted`. A symbol that isn't there is left out, and
    so is a module: `differences` names them.

    Raises ContractError where `source` holds no slime.
    """
    if not (source / FLAGS_FILE).is_file():
        raise ContractError(f"{source} is no slime checkout: there is no {FLAGS_FILE}")
    modules = {}
    for module, names in wanted.items():
        path = file_of(source, module)
        if path is None:
            continue
        found = _definitions(ast.parse(path.read_text(), str(path)))
        symbols = {name: _symbol(node) for name, node in found.items() if name in set(names)}
        modules[module] = {"file": path.relative_to(source).as_posix(), "symbols": symbols}
    return {
        "slime_commit": commit,
        "slime_version": _version(source),
        "sglang_target": _sglang_target(source),
        "modules": modules,
        FLAGS_KEY: _flags(ast.parse((source / FLAGS_FILE).read_text())),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What `old` promises and `new` doesn't keep, one line each: file, symbol, what it was, what it is. Lines that only
    moved, and symbols and flags that only came, are no difference."""
    lines = []
    for module, entry in old["modules"].items():
        if module not in new["modules"]:
            lines.append(f"{entry['file']}: the module is gone")
            continue
        found = new["modules"][module]["symbols"]
        for name, before in entry["symbols"].items():
            where = f"{entry['file']}: {name}"
            if name not in found:
                lines.append(f"{where}: the {before['kind']} is gone")
            else:
                lines += _changed(where, before, found[name])
    gone = [flag for flag in old[FLAGS_KEY] if flag not in new[FLAGS_KEY]]
    return lines + [f"{FLAGS_FILE}: {flag}: the flag is gone" for flag in gone]


def _changed(where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if before["kind"] != after["kind"]:
        return [f"{where}: was a {before['kind']}, is a {after['kind']}"]
    if before["kind"] == "function":
        return _signature(where, before, after)
    lines = []
    for name, method in before["methods"].items():
        if name not in after["methods"]:
            lines.append(f"{where}.{name}: the method is gone")
        else:
            lines += _signature(f"{where}.{name}", method, after["methods"][name])
    if before["bases"] != after["bases"]:
        lines.append(f"{where}: bases ({', '.join(before['bases'])}) -> ({', '.join(after['bases'])})")
    gone = [name for name in before["fields"] if name not in after["fields"]]
    if gone:
        lines.append(f"{where}: the fields {', '.join(gone)} are gone")
    return lines


def _signature(where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = []
    if before["params"] != after["params"]:
        lines.append(f"{where}: parameters ({', '.join(before['params'])}) -> ({', '.join(after['params'])})")
    if before.get("async", False) != after.get("async", False):
        now = "is async now" if after.get("async") else "is no longer async"
        lines.append(f"{where}: {now}")
    return lines


def file_of(source: Path, module: str) -> Path | None:
    """The file of a module in a checkout; None where there is none."""
    stem = source.joinpath(*module.split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def _symbol(node: ast.stmt) -> dict[str, Any]:
    if not isinstance(node, ast.ClassDef):
        return {"kind": "function", **_function(node)}
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        "kind": "class",
        "line": node.lineno,
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": {f.name: _function(f) for f in functions},
        "fields": [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)],
    }


def _function(node: Any) -> dict[str, Any]:
    a = node.args
    params = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    if a.vararg:
        params.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        params.append("*")
    params += [arg.arg for arg in a.kwonlyargs]
    if a.kwarg:
        params.append(f"**{a.kwarg.arg}")
    found: dict[str, Any] = {"line": node.lineno, "params": params}
    if isinstance(node, ast.AsyncFunctionDef):
        found["async"] = True
    return found


def _flags(tree: ast.Module) -> dict[str, int]:
    """Every string literal that is the first argument of an `add_argument` or of slime's `reset_arg`, by its line."""
    flags: dict[str, int] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in ("add_argument", "reset_arg"):
            continue
        for argument in node.args:
            text = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(text, str) and text.startswith("--"):
                flags.setdefault(text, node.lineno)
    return flags


def _version(source: Path) -> str | None:
    """From setup.py or pyproject.toml."""
    for name in ("setup.py", "pyproject.toml"):
        path = source / name
        found = re.search(r'^\s*version\s*=\s*"([^"]+)"', path.read_text(), re.MULTILINE) if path.is_file() else None
        if found:
            return found[1]
    return None


def _sglang_target(source: Path) -> str | None:
    """The SGLang version that slime's own image is built from."""
    path = source / "docker" / "Dockerfile"
    found = re.search(r"SGLANG_IMAGE_TAG=v?([0-9][\w.]*)", path.read_text()) if path.is_file() else None
    return found[1] if found else None
