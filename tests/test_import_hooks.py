"""Functions that run right after the import of a module, on modules made for the test."""

from __future__ import annotations

import importlib

import pytest

from slime_backend.import_hooks import on_import


def test_runs_after_the_module_was_executed(make_module):
    name = make_module("reef_import_hook_a", "value = 1")
    seen = []
    on_import(name, lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module(name)
    assert seen == [1]
    assert importlib.import_module(name) is module
    assert seen == [1]


def test_runs_at_once_where_the_module_is_imported(make_module):
    name = make_module("reef_import_hook_b", "value = 1")
    importlib.import_module(name)
    seen = []
    on_import(name, lambda module: seen.append(module.value))
    assert seen == [1]


def test_functions_run_in_order_and_each_once(make_module):
    name = make_module("reef_import_hook_c", "value = 1")
    seen = []

    def first(module):
        seen.append("first")

    on_import(name, first)
    on_import(name, lambda module: seen.append("second"))
    on_import(name, first)
    importlib.import_module(name)
    assert seen == ["first", "second"]


def test_names_taken_from_the_module_are_the_changed_ones(make_module):
    name = make_module("reef_import_hook_d", "def value():\n    return 1")
    on_import(name, lambda module: setattr(module, "value", lambda: 2))
    user = make_module("reef_import_hook_user", f"from {name} import value")
    assert importlib.import_module(user).value() == 2


def test_a_function_that_fails_fails_the_import(make_module):
    name = make_module("reef_import_hook_e", "value = 1")

    def fail(module):
        raise RuntimeError("it no longer fits")

    on_import(name, fail)
    for _ in range(2):  # and the second import doesn't find a half-changed module
        with pytest.raises(RuntimeError, match="no longer fits"):
            importlib.import_module(name)


def test_the_module_keeps_its_own_loader(make_module):
    name = make_module("reef_import_hook_f", "value = 1")
    on_import(name, lambda module: None)
    module = importlib.import_module(name)
    assert isinstance(module.__spec__.loader, importlib.machinery.SourceFileLoader)
    assert module.__loader__ is module.__spec__.loader
