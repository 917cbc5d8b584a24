"""A slime that has changed where we rely on it ends the job before anything is loaded, with what is missing.

Each symbol, parameter, attribute and call in turn is renamed in a copy of slime's sources.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_backend.slime_hooks.contract import fit, touched
from slime_backend.slime_hooks.contract.fit import SlimeMovedError
from slime_backend.slime_hooks.contract.symbols import file_of

pytestmark = pytest.mark.slime


@pytest.fixture(scope="module")
def copy(slime_src: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its Python files; one copy, which a test changes and puts back."""
    root = tmp_path_factory.mktemp("moved") / "slime-copy"
    ignore = shutil.ignore_patterns("*.png", ".git", "docs", "examples", "tests")
    shutil.copytree(slime_src, root, ignore=ignore)
    return root


def renamed(root: Path, module: str, old: str, new: str) -> Iterator[Path]:
    """The file of `module` with a pattern replaced, while this is open."""
    path = file_of(root, module)
    assert path is not None
    text = path.read_text()
    changed = re.sub(old, new, text)
    assert changed != text, (module, old)
    path.write_text(changed)
    try:
        yield path
    finally:
        path.write_text(text)


def named_for(root: Path, module: str, old: str, new: str = "moved_away") -> list[str]:
    for _ in renamed(root, module, old, new):
        lines = fit.missing(root)
        with pytest.raises(SlimeMovedError) as raised:
            fit.check(root, cpu=True)
        assert "\n" not in str(raised.value)
        assert lines[0] in str(raised.value)
    return lines


def test_the_slime_that_this_was_written_for_fits(copy: Path) -> None:
    """The control."""
    assert fit.missing(copy) == []
    fit.check(copy, cpu=True)


SYMBOLS = [
    (module, touch.symbol)
    for module, touches in touched.TOUCHED.items()
    for touch in touches
    if not touch.bound and touch.symbol not in ("Sample", "RolloutServer")  # their fields are tried below
]


@pytest.mark.parametrize(("module", "symbol"), SYMBOLS, ids=lambda value: value.rpartition(".")[2])
def test_every_renamed_symbol_is_named(copy: Path, module: str, symbol: str) -> None:
    name = symbol.rpartition(".")[2]
    lines = named_for(copy, module, rf"(def|class) {name}\b", rf"\1 {name}_moved")
    assert any(symbol in line and "it is gone" in line for line in lines)


@pytest.mark.parametrize(
    ("module", "old", "named"),
    [
        ("slime.utils.types", r"\bnew_token_count\b", "new_token_count"),
        ("slime.utils.types", r"    loss_mask:", "loss_mask"),
        ("slime.ray.rollout", r"    update_weights: bool", "update_weights"),
        ("slime.utils.arguments", r'"--update-weight-mode"', "--update-weight-mode: the flag is gone"),
        ("slime.backends.sglang_utils.sglang_engine", r"\bkill_process_tree\b", "kill_process_tree"),
    ],
)
def test_parameters_fields_flags_and_imports(copy: Path, module: str, old: str, named: str) -> None:
    new = (
        old.replace(r"\b", "").replace("update_weight", "moved").replace("--", "--moved-").replace("loss_mask", "moved")
    )
    new = "moved_away" if new == old.replace(r"\b", "") else new
    assert any(named in line for line in named_for(copy, module, old, new))


ATTRIBUTES = [(module, name, attribute) for (module, name), wanted in fit.ATTRIBUTES.items() for attribute in wanted]


@pytest.mark.parametrize(("module", "owner", "attribute"), ATTRIBUTES)
def test_every_renamed_attribute_is_named(copy: Path, module: str, owner: str, attribute: str) -> None:
    folder = file_of(copy, module)
    assert folder is not None
    texts = {path: path.read_text() for path in folder.parent.glob("*.py")}
    try:
        for path, text in texts.items():  # a base class may set it
            path.write_text(re.sub(rf"self\.{attribute}\b", "self.moved_away", text))
        lines = fit.missing(copy)
    finally:
        for path, text in texts.items():
            path.write_text(text)
    assert any(f"{owner}: sets no self.{attribute}" in line for line in lines)


@pytest.mark.parametrize(("module", "symbol"), list(fit.CALLS))
def test_another_call_to_the_engines_is_named(copy: Path, module: str, symbol: str) -> None:
    call = sorted(fit.CALLS[module, symbol])[0]
    lines = named_for(copy, module, rf"\.{call}\.remote", ".surprise.remote")
    assert any(symbol in line and "surprise" in line and call in line for line in lines)


def test_a_module_of_the_cpu_mode_is_needed_there_alone(copy: Path) -> None:
    path = file_of(copy, "slime.utils.accelerator")
    assert path is not None
    moved = path.parent.with_name("moved_away") if path.name == "__init__.py" else path.with_name("moved_away.py")
    (path.parent if path.name == "__init__.py" else path).rename(moved)
    try:
        assert fit.missing(copy, cpu=False) == []
        assert "slime.utils.accelerator: the module is gone" in fit.missing(copy)
    finally:
        moved.rename(path.parent if path.name == "__init__.py" else path)


def test_a_job_ends_with_one_line_before_slime_is_imported(copy: Path) -> None:
    code = "from slime_backend.slime_hooks.entry import run; run('train')"
    module = f"{fit.UPDATERS}.update_weight_from_disk_delta"
    for _ in renamed(copy, module, r"def _reload_engines\b", "def _moved"):
        done = subprocess.run(
            [sys.executable, "-c", code, "--hf-checkpoint", "x"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "SLIME_SRC": str(copy)},
        )
    assert done.returncode == 2
    assert "_reload_engines: it is gone" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
