"""Changes of other packages' modules at the moment of their import, without a fork and without importing them early.

    on_import("slime.utils.accelerator", register_cpu)      # register_cpu(module) -> None, once it was executed
    on_source("megatron.core.optimizer", correct)           # correct(source, file) -> source, before it is compiled

The packages' order of imports stays their own. A function that raises makes the import fail with its error, so a change
that no longer fits is never skipped silently. One module may have both: its source is changed first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

ModuleFunction = Callable[[ModuleType], None]
SourceFunction = Callable[[str, str], str]

_functions: dict[str, list[ModuleFunction]] = {}
_sources: dict[str, SourceFunction] = {}


def on_import(module_name: str, function: ModuleFunction) -> None:
    """Call `function(module)` once `module_name` has been executed; at once if it is imported already.

    Functions of one module run in the order in which they were given; the same function twice counts once.
    """
    known = _functions.setdefault(module_name, [])
    if function in known:
        return
    known.append(function)
    _install()
    module = sys.modules.get(module_name)
    if module is not None:
        function(module)


def on_source(module_name: str, function: SourceFunction) -> bool:
    """Compile `function(source, file)` when `module_name` is imported. No file is changed.

    The first function of a module stays; another one for the same module is ignored. Returns False where the module is
    imported already, so that it is too late.
    """
    if module_name in _sources:
        return True
    if module_name in sys.modules:
        return False
    _sources[module_name] = function
    _install()
    return True


def _install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and puts our loaders around what they found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _functions and fullname not in _sources:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if isinstance(finder, _Finder) or find is None else find(fullname, path, target)
            if spec is not None:
                if fullname in _sources and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    spec.loader = _SourceLoader(fullname, spec.loader.path)
                if fullname in _functions and spec.loader is not None:
                    spec.loader = _FunctionLoader(spec.loader)
                return spec
        return None


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the changed source; bytecode of the unchanged one is neither read nor written."""

    def get_code(self, fullname: str) -> CodeType | None:
        source: Any = self.get_source(fullname)
        return compile(_sources[fullname](source, self.path), self.path, "exec", dont_inherit=True)


class _FunctionLoader(importlib.abc.Loader):
    """Executes the module by its own loader, gives it that loader back, and runs the functions."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)  # get_source, get_resource_reader, ...

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        for function in _functions[module.__name__]:
            function(module)
