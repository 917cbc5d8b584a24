"""Whether an installation that can't work is seen before anything is loaded, and said in one line with its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_backend.cli import installation
from slime_backend.cli.installation import Finding, examine, show
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.engine_process import plugin_entry
from slime_backend.engine_process.plugin_entry import PluginNotInstalledError

ROOT = Path(__file__).resolve().parents[1]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_this_installation_is_sound(capsys: pytest.CaptureFixture) -> None:
    found = by_name(examine())
    assert {f"hook {name}" for name in HOOK_MODULES} <= set(found)
    for what in ("Python", "entry point", "SGLang", "hook kv_evidence", "hook kv_spans", "hook kv_stamps"):
        assert found[what].state == "ok", found[what]
    assert show(list(found.values()), as_json=True)
    assert json.loads(capsys.readouterr().out)["sound"] is True


@pytest.fixture
def only_on_path(tmp_path: Path) -> dict[str, str]:
    """A Python that has this checkout on PYTHONPATH alone: its packages, and no installed reef-slime."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.metadata as m\n"
        "found = m.entry_points\n"
        "m.entry_points = lambda **k: [e for e in found(**k) if 'slime_backend' not in e.value]\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}


def run(code: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


REQUIRE = "from slime_backend.engine_process import plugin_entry as p; p.require()"


def test_pythonpath_alone_is_refused_with_the_command(only_on_path: dict[str, str]) -> None:
    done = run(REQUIRE, only_on_path)
    line = done.stderr.splitlines()[-1]
    assert "PluginNotInstalledError" in line
    assert f"{sys.executable} -m pip install {ROOT}" in line
    assert run(REQUIRE, {**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0  # the control


def test_doctor_names_it_and_fails(only_on_path: dict[str, str]) -> None:
    code = "import sys; from slime_backend.cli.app import main; main()"
    done = run(code, only_on_path, "doctor", "--installation", "--json")
    found = {f["what"]: f for f in json.loads(done.stdout.splitlines()[-1])["findings"]}
    assert done.returncode == 1
    assert found["entry point"]["state"] == "fault"
    assert "pip install" in found["entry point"]["todo"]


@pytest.mark.parametrize(
    ("child", "what", "state"),
    [
        ({"entries": [], "hooks": {}}, "entry point", "fault"),
        ({"entries": [plugin_entry.VALUE], "hooks": {}, "error": "ImportError: no torch"}, "SGLang", "fault"),
        (
            {"entries": [plugin_entry.VALUE], "hooks": {"kv_evidence": "this SGLang has no x"}},
            "hook kv_evidence",
            "fault",
        ),
        ({"entries": [plugin_entry.VALUE], "hooks": {"scope": "this SGLang has no x"}}, "hook scope", "absent"),
    ],
)
def test_what_a_child_process_lacks_is_named(
    child: Any, what: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "_child", lambda: child)
    finding = by_name(examine())[what]
    assert (finding.state, bool(finding.todo)) == (state, True)


def test_what_is_not_there_is_absent_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_version", lambda package: None)
    monkeypatch.setattr(installation, "_child", lambda: {"entries": [plugin_entry.VALUE], "hooks": {}})
    found = by_name(examine())
    assert [found[what].state for what in ("SGLang", "wandb", "report")] == ["absent"] * 3


@pytest.mark.parametrize(("named", "state"), [(None, "absent"), ("/nowhere", "fault")])
def test_a_slime_that_is_named_has_to_be_there(named: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_SRC", raising=False)
    if named:
        monkeypatch.setenv("SLIME_SRC", named)
    elif installation._slime().state == "ok":
        pytest.skip("slime is importable here, so nothing is absent")
    assert installation._slime().state == state


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PYTHONS", ((3, 8),))
    assert installation._python().state == "fault"


def test_a_launch_script_refuses_before_ray(tmp_path: Path, only_on_path: dict[str, str]) -> None:
    """`python3` has no reef-slime; `ray` would be found, and isn't called."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bin_ / "ray").write_text(f"#!/bin/sh\ntouch {tmp_path}/ray-was-called\n")
    for file in bin_.iterdir():
        file.chmod(0o755)
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "qwen3-4B.sh").write_text("MODEL_ARGS=()\n")
    environment = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "SLIME_SRC": str(tmp_path)}
    script = ROOT / "scripts" / "slime_qwen3_4b_disjoint.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2, done.stderr
    assert "reef-slime isn't installed in" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "ray-was-called").exists()


def test_the_error_is_one_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_entry, "is_installed", lambda: False)
    with pytest.raises(PluginNotInstalledError, match=r"docs/install\.md"):
        plugin_entry.require()
