"""The base of every error that this project raises for what went wrong outside of it. Imports nothing.

The command line catches `ReefError` alone and exits with its `exit_code` and one line; anything else is a bug and keeps
its traceback. wire.py and engine_plugin/, which run inside SGLang, stay apart: their errors are ValueErrors. Each
message is one clear line: what was seen, where, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class ReefError(Exception):
    """Something that a user, an engine, a disk or a trainer caused."""

    exit_code: ClassVar[int] = 1


class UsageError(ReefError):
    """A wrong command line, configuration or combination of settings: nothing was begun."""

    exit_code = 2


class EngineFault(ReefError):
    """One engine did not do what it was asked. `seen` is what it answered, `status` its HTTP status, if any."""

    def __init__(self, engine: str, seen: str, status: int | None = None, *, doing: str = "") -> None:
        super().__init__(": ".join(filter(None, (engine, doing, seen))))
        self.engine, self.seen, self.status = engine, seen, status


class RunError(ReefError, RuntimeError):
    """The run can't start or go on; one line."""


class RunMisused(UsageError, RunError):
    """What the command names isn't there: a run to go on with, a model."""
