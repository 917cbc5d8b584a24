"""Answers what a release of SGLang has from its Python sources alone: nothing is installed, imported or executed.

`Sources` is the second implementation of `engine_plugin.names.Sglang`; the first one asks the imported SGLang. The
plugin's own probes run on both, so what is read here is what an engine of that release would report.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from slime_backend.engine_plugin.names import Parameters

Read = Callable[[str], str | None]  # path below site-packages -> the text of that file, None where there is none
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """A name that a module takes from another one: `name` of `module`, or the module itself."""

    module: str
    name: str | None


@dataclass(slots=True)
class Module:
    """The names of a module, by what they are."""

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    values: dict[str, ast.expr | None] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules whose names it takes all


class Sources:
    """One release, read through `read`."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._attributes: dict[tuple[str, str], frozenset[str]] = {}

    # ---- engine_plugin.names.Sglang ---------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        module, rest = self._split(name)
        if module is None:
            return False
        if not rest:
            return True
        if len(rest) == 1:
            return self._defines(module, rest[0])
        found = self._class(module, rest[0])
        return found is not None and len(rest) == 2 and rest[1] in self._attributes_of(*found)

    def parameters(self, name: str) -> Parameters | None:
        function = self._function(name)
        if function is None:
            return None
        arguments = function.args
        return Parameters(
            positional=tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args)),
            keywords=tuple(a.arg for a in arguments.kwonlyargs),
            more_positional=arguments.vararg is not None,
            more_keywords=arguments.kwarg is not None,
        )

    def mentions(self, name: str, word: str) -> bool:
        function = self._function(name)
        nodes = () if function is None else ast.walk(function)
        return any(word in getattr(node, "attr", getattr(node, "id", "")) for node in nodes)

    def switch(self, name: str) -> bool | None:
        module, rest = self._split(name)
        found = self._class(module, rest[0]) if module is not None and len(rest) == 2 else None
        for node in () if found is None else found[1].body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == rest[1] for t in node.targets):
                value = node.value
                if isinstance(value, ast.Call) and value.args and isinstance(value.args[0], ast.Constant):
                    return bool(value.args[0].value)
        return None

    # ---- modules ----------------------------------------------------------------------------------------------------

    def _split(self, name: str) -> tuple[str | None, list[str]]:
        """The longest module that `name` begins with, and what follows it."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self._module(module) is not None:
                return module, parts[end:]
        return None, parts

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._read(f"{path}.py")
            text = self._read(f"{path}/__init__.py") if text is None else text
            self._modules[name] = None if text is None else _names_of(ast.parse(text), name)
        return self._modules[name]

    def _defines(self, module: str, name: str) -> bool:
        found = self._module(module)
        return found is not None and (
            any(name in names for names in (found.classes, found.functions, found.imports, found.values))
            or any(self._defines(star, name) for star in found.stars)
        )

    def _class(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.ClassDef] | None:
        found = self._module(module)
        if found is None or depth > 8:
            return None
        if name in found.classes:
            return module, found.classes[name]
        origin = found.imports.get(name)
        return None if origin is None or origin.name is None else self._class(origin.module, origin.name, depth + 1)

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self._class(module, base.id)) is not None:
                yield found

    def _attributes_of(self, module: str, node: ast.ClassDef) -> frozenset[str]:
        """Return what instances of a class have: methods, fields, and what its methods assign to `self`."""
        key = (module, node.name)
        if key not in self._attributes:
            self._attributes[key] = frozenset()  # a circle of bases ends here
            inherited = [self._attributes_of(*base) for base in self._bases(module, node)]
            self._attributes[key] = frozenset(_own_attributes(node)).union(*inherited)
        return self._attributes[key]

    def _function(self, name: str) -> Function | None:
        module, rest = self._split(name)
        if module is None or not rest:
            return None
        if len(rest) == 1:
            return self._module_function(module, rest[0])
        found = self._class(module, rest[0])
        return None if found is None else self._method(*found, rest[1])

    def _module_function(self, module: str, name: str) -> Function | None:
        found = self._module(module)
        if found is None or name in found.functions:
            return None if found is None else found.functions[name]
        origin = found.imports.get(name)
        return None if origin is None or origin.name is None else self._module_function(origin.module, origin.name)

    def _method(self, module: str, node: ast.ClassDef, name: str) -> Function | None:
        for item in node.body:
            if isinstance(item, Function) and item.name == name:
                return item
        inherited = (self._method(*base, name) for base in self._bases(module, node))
        return next((method for method in inherited if method is not None), None)


def _names_of(tree: ast.Module, name: str) -> Module:
    found = Module()
    for node in _statements(tree.body):
        match node:
            case ast.ClassDef():
                found.classes[node.name] = node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.functions[node.name] = node
            case ast.ImportFrom():
                origin = _origin(node, name)
                if node.names[0].name == "*":
                    found.stars.append(origin)
                else:
                    found.imports |= {a.asname or a.name: Import(origin, a.name) for a in node.names}
            case ast.Import():
                found.imports |= {a.asname or a.name.split(".")[0]: Import(a.name, None) for a in node.names}
            case ast.Assign():
                found.values |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=target)):
                found.values[target] = node.value
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that a module executes, those inside `if` and `try` included, those for type checkers not."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse])
        elif isinstance(node, ast.With):
            yield from _statements(node.body)


def _origin(node: ast.ImportFrom, name: str) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _own_attributes(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        match item:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield item.name
                yield from _assigned_to_self(item)
            case ast.Assign():
                yield from (t.id for t in item.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=target)):
                yield target


def _assigned_to_self(method: Function) -> Iterator[str]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments:
        return
    for node in ast.walk(method):
        match node:
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id=owner)) if owner == arguments[0].arg:
                yield node.attr


def from_wheel(path: Path) -> Sources:
    """The release in a wheel, read from the archive."""
    archive = zipfile.ZipFile(path)
    names = frozenset(archive.namelist())
    return Sources(lambda name: archive.read(name).decode() if name in names else None)


def from_directory(root: Path) -> Sources:
    """The release that lies below `root`, a directory of installed packages."""

    @cache
    def read(name: str) -> str | None:
        path = root / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return Sources(read)
