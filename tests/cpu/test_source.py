"""Shims that fail loudly: packages with the text that a shim was written for, and without it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from slime_backend.cpu import megatron, source, tensor_ipc
from slime_backend.cpu.source import SourceMovedError
from slime_backend.import_hooks import on_import


def test_rewrite_changes_what_runs_and_no_file(make_module, tmp_path: Path):
    name = make_module("reef_rewrite_a", "kinds = ['torch.cuda.FloatTensor', 'torch.cuda.HalfTensor']\n")
    before = (tmp_path / f"{name}.py").read_text()
    source.rewrite(name, {"'torch.cuda.": "'torch."})
    assert importlib.import_module(name).kinds == ["torch.FloatTensor", "torch.HalfTensor"]
    assert (tmp_path / f"{name}.py").read_text() == before


def test_rewrite_of_moved_source_is_one_clear_line(make_module, tmp_path: Path):
    name = make_module("reef_rewrite_b", "kinds = []\n")
    source.rewrite(name, {"'torch.cuda.": "'torch."})
    with pytest.raises(SourceMovedError) as caught:
        importlib.import_module(name)
    message = str(caught.value)
    assert message.startswith(f'{tmp_path}/{name}.py: {name} no longer contains "\'torch.cuda."')
    assert "megatron-core 0.19.2" in message
    assert "\n" not in message


def test_rewrite_after_the_import_is_refused(make_module):
    name = make_module("reef_rewrite_c", "kinds = ['torch.cuda.FloatTensor']\n")
    importlib.import_module(name)
    with pytest.raises(SourceMovedError, match="imported before"):
        source.rewrite(name, {"'torch.cuda.": "'torch."})


def test_a_use_that_is_gone_fails_the_import(make_module):
    name = make_module("reef_use_a", "stream = None\n")
    on_import(name, megatron._check(name, ("torch.cuda.current_stream()",)))
    with pytest.raises(SourceMovedError, match=r"torch\.cuda\.current_stream\(\)"):
        importlib.import_module(name)


@pytest.mark.parametrize("first", ["the source", "the function"])
def test_a_module_may_have_its_source_changed_and_a_function_run(make_module, first):
    """In either order of registration: the function sees what the changed source made."""
    name = make_module(f"reef_both_{first[-8:].strip().replace(' ', '_')}", "kind = 'torch.cuda.FloatTensor'\n")
    seen = []
    steps = [
        lambda: source.rewrite(name, {"'torch.cuda.": "'torch."}),
        lambda: on_import(name, lambda module: seen.append(module.kind)),
    ]
    for step in steps if first == "the source" else reversed(steps):
        step()
    importlib.import_module(name)
    assert seen == ["torch.FloatTensor"]


def test_a_use_that_is_there_passes(make_module):
    name = make_module("reef_use_b", "use = 'torch.cuda.current_stream()'\n")
    on_import(name, megatron._check(name, ("torch.cuda.current_stream()",)))
    assert importlib.import_module(name).use == "torch.cuda.current_stream()"


@pytest.mark.parametrize("shim", [megatron._use_cpu_generator, tensor_ipc._keep_reductions])
def test_a_function_that_moved_fails_its_shim(make_module, shim):
    name = make_module(f"reef_moved_{shim.__name__}", "def something_else(): ...\n")
    module = importlib.import_module(name)
    with pytest.raises(SourceMovedError, match="no longer contains 'def "):
        shim(module)
