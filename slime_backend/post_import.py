"""Run a function on a module right after it was imported, whenever that is.

    on_import("slime.utils.accelerator", register_cpu)      # register_cpu(module) -> None

This is how slime and Megatron-core are changed without a fork and without importing them early: their order of imports
stays their own. A function that raises makes the import fail with its error, so a change that no longer fits is never
skipped silently.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ModuleFunction = Callable[[ModuleType], None]

_functions: dict[str, list[ModuleFunction]] = {}


def on_import(module_name: str, function: ModuleFunction) -> None:
    """Call `function(module)` once `module_name` has been executed; at once if it is imported already.

    Functions of one module run in the order in which they were given; the same function twice counts once.
    """
    known = _functions.setdefault(module_name, [])
    if function in known:
        return
    known.append(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(module_name)
    if module is not None:
        function(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and puts `_Loader` around what they found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _functions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if isinstance(finder, _Finder) or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
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
