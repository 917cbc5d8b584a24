"""Where slime is: its package, and its `train.py`, which lies next to the package and is not part of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from slime_backend.errors import ReefError

VARIABLE = "SLIME_SRC"


class SlimeNotFoundError(ReefError, RuntimeError):
    """slime's package or one of its scripts isn't there; the message says where it was looked for."""


def make_importable() -> None:
    """Put the checkout that SLIME_SRC names in front of sys.path; without the variable nothing changes.

    A relative path becomes absolute: Ray's workers, which are passed the variable, may run elsewhere.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    os.environ[VARIABLE] = absolute = os.path.abspath(os.path.expanduser(named))
    if absolute not in sys.path:
        sys.path.insert(0, absolute)


def root() -> Path:
    """The directory of the slime checkout: SLIME_SRC, else the parent of the importable package `slime`.

    Raises SlimeNotFoundError.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not (Path(named) / "slime" / "__init__.py").is_file():
            raise SlimeNotFoundError(f"{VARIABLE}={named} is not a slime checkout: it holds no slime/__init__.py")
        return Path(named)
    spec = importlib.util.find_spec("slime")
    if spec is None or spec.origin is None:
        raise SlimeNotFoundError(
            f"slime is not importable; run this in a slime checkout, pip install -e it, or set {VARIABLE} to it"
        )
    return Path(spec.origin).parent.parent


def load_script(name: str) -> ModuleType:
    """Import `train.py` or `train_async.py` (without its ending) from the checkout; its `main` part doesn't run.

    Raises SlimeNotFoundError.
    """
    path = root() / f"{name}.py"
    if not path.is_file():
        raise SlimeNotFoundError(
            f"{path} does not exist: slime is installed without its scripts; set {VARIABLE} to a slime checkout"
        )
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    loader.exec_module(module)
    if not callable(getattr(module, "train", None)):
        raise SlimeNotFoundError(f"{path} defines no train(args); this was written for slime 0.3.1")
    return module
