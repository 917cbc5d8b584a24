"""`require` and `rewrite` change other packages' source, and fail with an error when that source has moved.

A shim is written for one text in one file. `require` and `rewrite` look for that text first; without it they raise
`SourceMovedError`, one line with the file, the symbol and what to do, instead of leaving a change that no longer fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from slime_backend.errors import ReefError
from slime_backend.import_hooks import on_source

WRITTEN_FOR = "megatron-core 0.19.2 and slime 0.3.1"


class SourceMovedError(ReefError, RuntimeError):
    """A module no longer contains the text that a shim was written for.

    Not an ImportError: Megatron-core and SGLang ignore those where they try optional packages.
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
    """Raise SourceMovedError unless the texts occur in the source of an imported module."""
    file = module.__file__ or ""
    require(module.__name__, file, Path(file).read_text(), texts)


def rewrite(module_name: str, replacements: dict[str, str]) -> None:
    """When `module_name` is imported, compile its source with each key replaced by its value. No file is changed.

    Raises SourceMovedError where the module is imported already.
    """

    def replaced(source: str, file: str) -> str:
        require(module_name, file, source, list(replacements))
        for old, new in replacements.items():
            source = source.replace(old, new)
        return source

    if not on_source(module_name, replaced):
        raise SourceMovedError(f"{module_name} was imported before the CPU mode could prepare it")


def _found(module_name: str) -> str:
    package = {"megatron": "megatron-core"}.get(module_name.partition(".")[0], module_name.partition(".")[0])
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"a {package} that isn't installed as a package"
