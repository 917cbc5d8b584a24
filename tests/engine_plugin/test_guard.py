"""A fault in a hook's code never reaches SGLang: for every function that any hook attaches to any release."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.engine_plugin import HOOK_MODULES, guard, registry
from slime_backend.engine_plugin.guard import Refused, guarded


class Everything:
    """An SGLang of one of the two generations, which has whatever it is asked for."""

    def __init__(self, newer: bool) -> None:
        self.newer = newer

    def has(self, name: str) -> bool:
        return self.newer or not name.endswith(("handle_update_weight_version", "weight_versions", "streamer_class"))

    def parameters(self, name: str) -> None:
        return None

    def mentions(self, name: str, word: str) -> bool:
        return True

    def switch(self, name: str) -> bool:
        return "RUST" not in name


def attached() -> list[tuple[str, registry.HookFunction]]:
    import importlib

    found = [
        (hook, function)
        for newer in (True, False)
        for hook, module in HOOK_MODULES.items()
        for function in importlib.import_module(module).plan(Everything(newer)).functions
    ]
    return list(dict.fromkeys(found))


class Broken:
    """An argument of a form that no hook knows: whatever is asked of it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("planted")


def call(kind: str, function: Any, original: Any) -> Any:
    """As SGLang's wrapper calls a hook (plugins/hook_registry.py), with arguments that can't be used."""
    ours = list(inspect.signature(function).parameters.values())[0 if kind == "before" else 1 :]
    args = [Broken() for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    kwargs = {p.name: Broken() for p in ours if p.kind is p.KEYWORD_ONLY}
    if kind == "around":
        return function(original, *args, **kwargs)
    if kind == "before":
        replaced = function(*args, **kwargs)
        assert replaced is None
        return original(*args, **kwargs)
    result = original(*args, **kwargs)
    modified = function(result, *args, **kwargs)
    return result if modified is None else modified


@pytest.mark.parametrize("attempt", range(2))
def test_every_hook_with_a_fault_leaves_sglang_its_result(attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_faults", {})
    functions = attached()
    assert len(functions) >= 50
    for hook, (target, kind, function) in functions:

        def planted(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            raise RuntimeError("planted")

        planted.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        ran: list[int] = []

        def original(*args: Any, ran: list[int] = ran, **kwargs: Any) -> str:
            ran.append(1)
            return "SGLang's"

        registry._faults.clear()
        report = lambda error, hook=hook, target=target: registry.report_fault([hook], target, error)  # noqa: E731
        assert call(kind, guarded(kind, planted, report), original) == "SGLang's"
        assert ran == [1]
        assert registry.statuses()[hook] == f"failed in {target}: RuntimeError: planted"
        with pytest.raises(RuntimeError, match="planted"):  # the control: without the guard SGLang gets it
            call(kind, planted, original)


def test_an_original_that_ran_before_the_fault_does_not_run_again() -> None:
    ran: list[int] = []
    faults: list[Exception] = []

    def late(original: Any, value: int) -> int:
        original(value)
        raise ValueError("late")

    def original(value: int) -> int:
        ran.append(value)
        return value

    assert guarded("around", late, faults.append)(original, 7) == 7
    assert (ran, [str(fault) for fault in faults]) == ([7], ["late"])


def test_a_part_of_the_work_is_followed_by_what_was_asked() -> None:
    ran: list[int] = []

    def in_parts(original: Any, up_to: int) -> None:
        original(up_to - 1)
        raise ValueError("between two parts")

    guarded("around", in_parts, lambda error: None)(ran.append, 7)
    assert ran == [6, 7]


def test_what_sglang_raises_goes_on_unchanged() -> None:
    faults: list[Exception] = []

    def original() -> None:
        raise KeyError("SGLang's own")

    with pytest.raises(KeyError, match="SGLang's own"):
        guarded("around", lambda original: original(), faults.append)(original)
    assert faults == []


def test_a_refused_request_is_no_fault() -> None:
    def refuse(request: Any) -> None:
        raise Refused("kv_anchors must be a list")

    with pytest.raises(ValueError, match="kv_anchors must be a list"):
        guarded("before", refuse, lambda error: pytest.fail("reported"))(SimpleNamespace())


def test_attempt_returns_the_other_value() -> None:
    faults: list[Exception] = []
    assert guard.attempt(lambda: 1 // 0, report=faults.append, otherwise=3) == 3
    assert isinstance(faults[0], ZeroDivisionError)
