"""Changes of other packages' source that fail loudly when that source has moved.

A shim is written for one text in one file. `require` and `rewrite` look for that text first; without it they raise
`SourceMovedError`, one line with the file, the symbol and what to do, instead of leaving a change that no longer fits.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

WRITTEN_FOR = "megatron-core 0.19.2 and slime 0.3.1"


class SourceMovedError(RuntimeError):
    """A module no longer contains the text that a shim was written for.

    Not an ImportError: Megatron-core and SGLang pass over those where they try optional packages.
    """


def require(module_name: str, file: str, source: str, texts: Sequence[str]) -> None:
    """Raise SourceMovedError unless every one of `texts` occurs in `source`, the text of `file`."""
    for text in texts:
        if text not in source:
            raise SourceMovedError(
                f"{file}: {module_name} no longer contains {text!r}, so the CPU shim for it no longer fits "
                f"(written for {WRITTEN_FOR}; found {_found(module_name)}); install those versions, or correct "
                "slime_backend/cpu"
            )


def require_in(module: ModuleType, texts: Sequence[str]) -> None:
    """The same for a module that is imported already."""
    file = module.__file__ or ""
    require(module.__name__, file, Path(file).read_text(), texts)


def rewrite(module_name: str, replacements: dict[str, str]) -> None:
    """When `module_name` is imported, compile its source with each key replaced by its value. No file is changed.

    Too late, and an error, where the module is imported already.
    """
    if module_name in _rules:
        return
    if module_name in sys.modules:
        raise SourceMovedError(f"{module_name} was imported before the CPU mode could prepare it")
    _rules[module_name] = replacements
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _found(module_name: str) -> str:
    package = {"megatron": "megatron-core"}.get(module_name.partition(".")[0], module_name.partition(".")[0])
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"a {package} that isn't installed as a package"


_rules: dict[str, dict[str, str]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _rules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source: Any = self.get_source(fullname)
        rules = _rules[fullname]
        require(fullname, self.path, source, list(rules))
        for old, new in rules.items():
            source = source.replace(old, new)
        return compile(source, self.path, "exec", dont_inherit=True)
