"""Keeps what goes wrong in our code away from SGLang, whose scheduler ends its process on any exception.

`guarded` goes around every function that is attached to SGLang (registry.py), and `attempt` around our code in the few
places that SGLang calls by another way. Whatever our code raises, SGLang's own function has run once as it was called,
and SGLang gets its result; the fault is passed to `report`, becomes the hook's status, and a controller retires the
engine at its next step. What SGLang's own function raises goes on unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Kind = Literal["before", "after", "around"]
Report = Callable[[Exception], None]
T = TypeVar("T")


class Refused(ValueError):
    """A hook turns a request down: its sender is at fault and gets the message (a ValueError is SGLang's HTTP 400)."""


class _Original:
    """SGLang's function as an `around` hook gets it; knows whether it has run as SGLang called it."""

    __slots__ = ("_args", "_function", "_kwargs", "raised", "ran", "result")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.ran = False
        self.result: Any = None
        self.raised: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        if self._as_called(args, kwargs):
            self.ran, self.result = True, result
        return result

    def _as_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the caller's arguments; a hook may call for a part of the work first, or add defaults."""
        return (
            len(args) >= len(self._args)
            and all(mine is theirs for mine, theirs in zip(args, self._args, strict=False))
            and all(name in kwargs and kwargs[name] is value for name, value in self._kwargs.items())
        )


def guarded(kind: Kind, function: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """`function`, a hook of SGLang's hook registry, such that nothing which it raises reaches SGLang."""
    return {"before": _listening, "after": _listening, "around": _around}[kind](function, report)


def attempt(function: Callable[..., T], *args: Any, report: Report, otherwise: T) -> T:
    """The result of `function(*args)`, or `otherwise` where it raises."""
    try:
        return function(*args)
    except Exception as error:
        report(error)
        return otherwise


def _listening(function: Callable[..., Any], report: Report) -> Callable[..., Any]:
    @functools.wraps(function)
    def listen(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            report(error)
            return None  # to SGLang: arguments and result stay as they are

    return listen


def _around(function: Callable[..., Any], report: Report) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Original(original, args, kwargs)
        try:
            return function(call, *args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            if error is not call.raised:
                report(error)
            if call.raised is not None:
                raise call.raised from None
            return call.result if call.ran else original(*args, **kwargs)

    return around
