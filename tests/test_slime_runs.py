"""The compatibility table of slime says what was run, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.launch_scripts import ROOT


@pytest.fixture
def slime_runs(tmp_path, monkeypatch):
    """The script as a module, with files of its own, and a slime that is nothing but its version."""
    spec = importlib.util.spec_from_file_location("slime_runs", ROOT / "scripts" / "slime_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    module.PAGE.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "arguments.py").touch()
    (tmp_path / "setup.py").write_text('version="0.3.1"\n')
    monkeypatch.setenv("SLIME_SRC", str(tmp_path))
    return module


def cells(module, path):
    lines = module.table(module.read()).splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {module.PATHS[path]} |")]
    return [cell.strip() for cell in line.replace("\\|", "/").split("|")[2:-1]]


def test_a_cell_is_the_newest_run_with_its_command_and_all_others_were_not_run(slime_runs, monkeypatch):
    monkeypatch.setattr(slime_runs.importlib.metadata, "version", lambda name: "0.5.23")
    assert slime_runs.run("async", [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    first = cells(slime_runs, "async")
    assert first[0].startswith("**failed** ")
    assert slime_runs.run("async", [sys.executable, "-c", "print('a | b')"]) == 0
    found = cells(slime_runs, "async")
    assert found[0].startswith("passed ")
    assert found[-1] == "not run"
    lines = slime_runs.table(slime_runs.read())
    assert lines.count("passed ") == 1
    assert lines.count("not run") == 2 * len(slime_runs.PATHS) - 1


def test_another_version_gets_a_column(slime_runs):
    row = {
        "path": "gpu",
        "slime": "0.4.0",
        "sglang": "0.6.0",
        "date": "d",
        "passed": True,
        "seconds": 1,
        "command": "c",
    }
    slime_runs.RUNS.write_text(json.dumps(row) + "\n")
    assert cells(slime_runs, "gpu") == ["not run", "not run", "passed d, 1 s: `c`"]


def test_only_the_table_is_written(slime_runs):
    text = slime_runs.page([])
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_the_page_is_what_its_runs_say():
    spec = importlib.util.spec_from_file_location("slime_runs", ROOT / "scripts" / "slime_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(module.read())
    assert all(set(row) >= {"date", "command", "passed"} and row["path"] in module.PATHS for row in module.read())
