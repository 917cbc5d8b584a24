"""`command` writes a `reef-slime` command that works when it is pasted, also where no such script is on PATH."""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "reef-slime"
ROOT = Path(__file__).resolve().parents[1]


def command(*words: object) -> str:
    """Return the command line of `reef-slime WORDS`, quoted for a shell, for the Python that runs this.

    The bare name is enough where PATH finds the script of this very environment; another environment's would lack what
    this one has. Otherwise it is the script by its absolute path, or this Python with `-m`.
    """
    return shlex.join([*_start(), *map(str, words)])


def python_module(module: str, *words: object) -> str:
    """Return the command line of `python -m MODULE WORDS` for the Python that runs this."""
    return shlex.join([sys.executable, "-m", module, *map(str, words)])


def _start() -> list[str]:
    script = Path(sys.executable).with_name(SCRIPT)
    if script.is_file():
        found = shutil.which(SCRIPT)
        return [SCRIPT if found and Path(found).samefile(script) else str(script)]
    module = [sys.executable, "-m", "slime_backend.cli"]
    return module if _installed() else ["env", f"PYTHONPATH={ROOT}", *module]


def _installed() -> bool:
    """Whether a new process of this Python finds the package without a PYTHONPATH."""
    try:
        importlib.metadata.distribution(SCRIPT)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
