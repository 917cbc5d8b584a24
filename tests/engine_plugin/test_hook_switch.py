"""The switch that `reef-slime bench overhead` takes the hooks out with: which functions it puts where, without SGLang.

That a real engine's answers have a record with the hooks in and none without them is checked by the bench at each
batch, and by test_hook_switch_engine.py.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from slime_backend.engine_plugin import hook_switch
from slime_backend.engine_process import DEFAULT_HOOKS, RUN_HOOKS
from slime_backend.policy import decide


def hooked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """As SGLang wraps it (plugins/hook_registry.py)."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return f"{name}({function(*args)})"

    return wrapper


@functools.lru_cache
def decorated() -> str:
    """SGLang's own functions may bear decorators with a `__wrapped__` of their own; those stay."""
    return "plain"


class Owner:
    def method(self) -> str:
        return "plain"

    def other(self) -> str:
        return "other"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A module with a function that two hooks wrap, and one that has imported it under another name."""
    one, two = types.ModuleType("made_one"), types.ModuleType("made_two")
    one.call = two.renamed = hooked(hooked(decorated, "a"), "b")  # type: ignore[attr-defined]
    one.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setattr(Owner, "method", hooked(Owner.method, "a"))
    monkeypatch.setitem(sys.modules, "made_one", one)
    monkeypatch.setitem(sys.modules, "made_two", two)
    return one, two


def test_no_run_asks_for_it() -> None:
    needed = {hook for sharing in ("off", "retract", "scoped", "unsafe") for hook in _needed(sharing)}
    assert needed >= {"kv_evidence", "scope"}
    assert hook_switch.HOOK not in {*DEFAULT_HOOKS, *RUN_HOOKS, *needed}


def _needed(sharing: Any) -> tuple[str, ...]:
    return decide("disjoint", sharing).needed_hooks


def test_out_and_in_again_wherever_it_was_imported(modules: Any) -> None:
    one, two = modules
    places = hook_switch.places_of("made_one.call", 2)
    assert {(place.owner, place.name) for place in places} == {(one, "call"), (two, "renamed")}
    assert (one.call(), two.renamed()) == ("b(a(plain))",) * 2
    hook_switch.switch(places, on=False)
    assert (one.call(), two.renamed()) == ("plain",) * 2
    assert one.call is decorated
    hook_switch.switch(places, on=True)
    assert (one.call(), two.renamed()) == ("b(a(plain))",) * 2


def test_a_method_of_a_class(modules: Any) -> None:
    owner = Owner()
    places = hook_switch.places_of("made_one.Owner.method", 1)
    assert len(places) == 1
    hook_switch.switch(places, on=False)
    assert (owner.method(), owner.other()) == ("plain", "other")
    hook_switch.switch(places, on=True)
    assert (owner.method(), owner.other()) == ("a(plain)", "other")
