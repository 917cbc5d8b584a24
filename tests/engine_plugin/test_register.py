"""The entry point, in processes of its own: what it imports, and what it does with names it doesn't know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slime_backend import wire
from slime_backend.engine_plugin import HOOK_MODULES, UnknownHookError, register, requested_hooks

PROBE = """
import sys
from slime_backend.engine_plugin import register
register()
print(sorted({name.split(".")[0] for name in sys.modules} & {"sglang", "torch", "transformers"}))
print(sorted(name for name in sys.modules if name.startswith("slime_backend")))
"""


def run_probe(hooks: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != wire.HOOKS_VARIABLE}
    if hooks is not None:
        environment[wire.HOOKS_VARIABLE] = hooks
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("hooks", [None, "", " , "])
def test_a_process_without_the_variable_is_left_untouched(hooks: str | None) -> None:
    foreign, ours = run_probe(hooks)
    assert foreign == "[]"
    assert ours == "['slime_backend', 'slime_backend.engine_plugin', 'slime_backend.wire']"


def test_unknown_hook_is_an_error_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.HOOKS_VARIABLE, "kv_evidence,kv_evidense")
    with pytest.raises(UnknownHookError, match="kv_evidense; known are cpu_attention, kv_evidence, kv_spans, "):
        register()


def test_names_are_trimmed_and_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.HOOKS_VARIABLE, " kv_spans, kv_evidence ,kv_spans,")
    assert requested_hooks() == ("kv_spans", "kv_evidence")


def test_a_hook_that_fails_is_reported_and_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_backend.engine_plugin import registry

    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setitem(HOOK_MODULES, "broken", "slime_backend.engine_plugin.no_such_module")
    monkeypatch.setenv(wire.HOOKS_VARIABLE, "broken")
    register()
    assert "ModuleNotFoundError" in registry.statuses()["broken"]


def test_targets_that_this_sglang_lacks_are_named() -> None:
    from slime_backend.engine_plugin import registry

    present, absent = "os.path.join", "os.path.no_such_function"
    assert registry.missing_targets([present, absent, "no_such_package.module.name"]) == [
        absent,
        "no_such_package.module.name",
    ]
    assert registry.attach("anything", [(absent, "before", print)]) == f"this SGLang has no {absent}"
