"""`command` writes a `reef-slime` command that works when it is pasted, also where no such script is on PATH."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = "reef-slime"
MODULE = "slime_backend.cli"
ASK_S = 20.0
LOCATE = "import importlib.util as u; s = u.find_spec('slime_backend'); print(s.origin if s else '')"
ROOT = Path(__file__).resolve().parents[1]


def command(*words: object) -> str:
    """Return the command line of `reef-slime WORDS`, quoted for a shell, for the Python that runs this.

    The bare name is enough where PATH finds the script of this very environment; another environment's would lack what
    this one has. Otherwise it is the script by its absolute path, or this Python with `-m`, and with the PYTHONPATH
    that a checkout needs.
    """
    return shlex.join([*_start(), *map(str, words)])


def python_module(module: str, *words: object) -> str:
    """Return the command line of `python -m MODULE WORDS` for the Python that runs this."""
    return shlex.join([sys.executable, "-m", module, *map(str, words)])


def _start() -> list[str]:
    if not _found_without_pythonpath(sys.executable):
        return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", MODULE]
    script = Path(sys.executable).with_name(SCRIPT)
    if not script.is_file():
        return [sys.executable, "-m", MODULE]
    found = shutil.which(SCRIPT)
    return [SCRIPT if found and Path(found).samefile(script) else str(script)]


@functools.cache
def _found_without_pythonpath(python: str) -> bool:
    """Whether a new process of this Python imports this very package. Only it knows: an installation that can be edited
    may lead to another checkout, or to none."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        asked = subprocess.run(
            [python, "-c", LOCATE], cwd="/", env=environment, capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.stdout.strip() == str(ROOT / "slime_backend" / "__init__.py")
