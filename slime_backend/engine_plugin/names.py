"""The names of SGLang's that a hook uses: how they are declared, and how they are looked for.

Next to each hook's functions stands a table of what they use, one dotted name each: a function that is hooked, a class,
an attribute of its instances. Several names in parentheses are alternatives, of which the hook takes the one that is
there. The hook's own probe reads the table when it is installed, and `scripts/check_sglang_releases.py` reads it for
every release, from the sources; so what is checked beforehand is what an engine would report.

    USES = (f"{REQ}.output_ids", (f"{RECORD}.holds_kv", f"{REQ}.req_pool_idx"))

Names are looked for one by one and on the class itself, never by a version number: a release may have half of them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

Need = str | tuple[str, ...]  # a dotted name, or alternatives


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function of SGLang's."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()  # by keyword only
    more_positional: bool = False  # *args
    more_keywords: bool = False  # **kwargs


class Sglang(Protocol):
    """What can be asked about a release of SGLang."""

    def has(self, name: str) -> bool:
        """Whether there is a module, a name of a module, or an attribute of a class's instances under `name`."""

    def parameters(self, name: str) -> Parameters | None:
        """The parameters of a function, `self` included; None where there is none, or they can't be read."""

    def mentions(self, name: str, word: str) -> bool:
        """Whether the body of the function `name` uses an attribute or a global with `word` in its name."""

    def switch(self, name: str) -> bool | None:
        """The value of a switch of SGLang's (environ.py); None where there is none."""


def missing(sglang: Sglang, needs: Iterable[Need]) -> list[str]:
    """The needs that a release doesn't meet, alternatives joined by "or"."""
    found = []
    for need in needs:
        names = (need,) if isinstance(need, str) else need
        if not any(sglang.has(name) for name in names):
            found.append(" or ".join(names))
    return list(dict.fromkeys(found))


def misfit(parameters: Parameters, function: Callable[..., Any], skipped: int) -> str | None:
    """Why a hook's `function` can't be called as SGLang calls the function that it is hooked to, or None.

    `skipped`: the leading arguments that aren't the caller's (the original, or its result). SGLang may pass any
    argument by keyword, so the names have to be SGLang's; but for the first, which is the object of a method.
    """
    ours = list(inspect.signature(function).parameters.values())[skipped:]
    for position, parameter in enumerate(ours):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY:
            if name not in (*parameters.positional, *parameters.keywords):
                return f"no parameter {name}"
        elif position >= len(parameters.positional):
            return f"no parameter {name}"
        elif parameters.positional[position] not in (name, "self"):
            return f"{parameters.positional[position]} in the place of {name}"
    return None


class Imported:
    """The SGLang that this process runs."""

    def has(self, name: str) -> bool:
        if _resolve(name) is not _ABSENT:
            return True
        owner, _, attribute = name.rpartition(".")
        found = _resolve(owner)
        return isinstance(found, type) and attribute in _instance_attributes(found)

    def parameters(self, name: str) -> Parameters | None:
        function = _resolve(name)
        try:
            found = list(inspect.signature(inspect.unwrap(function)).parameters.values())
        except (TypeError, ValueError):
            return None
        return Parameters(
            positional=tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            keywords=tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY),
            more_positional=any(p.kind is p.VAR_POSITIONAL for p in found),
            more_keywords=any(p.kind is p.VAR_KEYWORD for p in found),
        )

    def mentions(self, name: str, word: str) -> bool:
        code = getattr(inspect.unwrap(_resolve(name)), "__code__", None)
        # Code that can't be read may mention anything.
        return code is None or any(word in used for part in _codes(code) for used in part.co_names)

    def switch(self, name: str) -> bool | None:
        found = _resolve(name)
        return None if found is _ABSENT else bool(found.get())


IMPORTED = Imported()
_ABSENT: Any = object()  # a name may well be bound to None


def _resolve(name: str) -> Any:
    """The object under a dotted name; _ABSENT where there is none, or its module can't be imported."""
    try:
        return pkgutil.resolve_name(name)
    except Exception:  # AttributeError; and an optional module may fail by anything that it imports
        return _ABSENT


@functools.cache
def _instance_attributes(cls: type) -> frozenset[str]:
    """What instances have beyond the class's own attributes: annotated fields, slots, and what methods set on self."""
    found: set[str] = set()
    for base in cls.__mro__:
        found.update(vars(base).get("__annotations__", ()))
        slots = vars(base).get("__slots__", ())
        found.update((slots,) if isinstance(slots, str) else slots)
        for value in vars(base).values():
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                found.update(_assigned_to_self(code))
    return frozenset(found)


def _assigned_to_self(code: CodeType) -> Iterator[str]:
    if not code.co_argcount:
        return
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and before is not None:
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if before.opname.startswith("LOAD_") and loaded[-1] == code.co_varnames[0]:
                yield str(instruction.argval)
        before = instruction


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
