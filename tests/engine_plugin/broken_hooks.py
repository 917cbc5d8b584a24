"""Makes the functions that hooks attach raise inside a running engine, where and when a test says.

`environment(folder)` goes into an engine's environment: each of its processes then imports this module before anything
else, and every function that a hook attaches is replaced by one that reads `folder/armed`. Each line of that file names
a function, the place of the fault, and whether the guard is around it:

    slime_backend.engine_plugin.kv_spans._after_prefill|first|guarded

    first     before the function's first line
    between   right after the SGLang function that it is around has returned (only a function of the kind "around")
    last      after its last line

Every function that ran is a line of `folder/ran`, and every fault that was raised one of `folder/raised`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.engine_plugin import guard

VARIABLE = "REEF_TEST_BROKEN_HOOKS"
ROOT = Path(__file__).parents[2]


class Planted(RuntimeError):
    """A fault of a hook's code."""


@dataclass(frozen=True)
class Fault:
    function: str
    place: str
    guarded: bool = True

    def __str__(self) -> str:
        return f"{self.function}|{self.place}|{'guarded' if self.guarded else 'bare'}"


def environment(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text("from tests.engine_plugin import broken_hooks\n\nbroken_hooks.install()\n")
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def arm(folder: Path, *faults: Fault) -> None:
    replaced = folder / "armed.new"
    replaced.write_text("\n".join(map(str, faults)))
    replaced.replace(folder / "armed")
    (folder / "raised").unlink(missing_ok=True)


def lines(folder: Path, name: str) -> Iterator[str]:
    path = folder / name
    yield from dict.fromkeys(path.read_text().split()) if path.exists() else ()


def install() -> None:
    """In an engine's process."""
    folder = Path(os.environ[VARIABLE])
    plain = guard.guarded

    def guarded(kind: guard.Kind, function: Callable[..., Any], report: guard.Report) -> Callable[..., Any]:
        name = f"{function.__module__}.{function.__qualname__}"
        inside = plain(kind, _faulty(folder, name, kind, function, True), report)
        return _faulty(folder, name, kind, inside, False)

    guard.guarded = guarded


def _faulty(folder: Path, name: str, kind: str, function: Callable[..., Any], inside: bool) -> Callable[..., Any]:
    noted: set[str] = set()

    def armed(place: str) -> bool:
        return str(Fault(name, place, inside)) in _read(folder / "armed").split()

    def fail(place: str) -> None:
        if armed(place):
            _append(folder / "raised", name)
            raise Planted(f"planted {place}")

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if inside and name not in noted:
            noted.add(name)
            _append(folder / "ran", f"{name}|{kind}")
        fail("first")
        if kind == "around" and armed("between"):
            args = (_then(args[0], functools.partial(fail, "between")), *args[1:])
        result = function(*args, **kwargs)
        fail("last")
        return result

    return faulty


def _then(original: Callable[..., Any], fail: Callable[[], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        fail()

    return run


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _append(path: Path, line: str) -> None:
    with path.open("a") as out:
        out.write(line + "\n")
