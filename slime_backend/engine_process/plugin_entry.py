"""Whether an SGLang that this Python starts would find our hooks, as SGLang looks for them.

SGLang loads plugins by the entry points of installed packages (0.5.23, srt/plugins/__init__.py). A checkout that is
only on PYTHONPATH has none: its engine starts without hooks, and a controller finds that out minutes later, when
checkpoint and engines are loaded.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

from slime_backend.errors import ReefError

GROUP = "sglang.srt.plugins"
VALUE = "slime_backend.engine_plugin:register"


class PluginNotInstalledError(ReefError, RuntimeError):
    """This Python has the package, and SGLang would not find its hooks."""


def is_installed() -> bool:
    """Milliseconds; imports nothing."""
    return any(entry.value == VALUE for entry in entry_points(group=GROUP))


def require() -> None:
    """Raise PluginNotInstalledError with the command that installs this package."""
    if is_installed():
        return
    root = Path(__file__).resolve().parents[2]
    what = str(root) if (root / "pyproject.toml").is_file() else "reef-slime"
    raise PluginNotInstalledError(
        f"SGLang would not find reef-slime's hooks: {sys.executable} has no package with the entry point {VALUE} "
        f"({GROUP}); being on PYTHONPATH isn't enough. Install it there, on every node: {sys.executable} -m pip "
        f"install {what} (docs/install.md)"
    )
