"""The W&B workspace in configs/trackers names metrics that are logged. That W&B takes it can't be tested offline."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend.tracking.tracker import STEP_METRICS

from .test_metrics import logged

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_wandb_workspace.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_wandb_workspace", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_panel_shows_logged_metrics_over_the_step_of_their_family(script):
    sections = script.read_spec()["sections"]
    assert {section["x"] for section in sections} == set(STEP_METRICS.values())
    for section in sections:
        for panel in section["panels"]:
            assert set(panel["metrics"]) <= logged(), panel["title"]
            assert {STEP_METRICS[name.partition("/")[0]] for name in panel["metrics"]} == {section["x"]}


def test_the_workspace_can_be_built(script):
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    workspace = script.build(script.read_spec(), "somebody", "reef-slime")
    assert [s.name for s in workspace.sections] == [s["name"] for s in script.read_spec()["sections"]]
    assert workspace.sections[0].panels[0].y == ["train/reward_mean"]


def test_without_the_package_it_says_what_to_install():
    hide = "import runpy, sys; sys.modules['wandb_workspaces'] = None; del sys.argv[0]; "
    code = hide + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT), "x"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "wandb_workspaces is not installed: pip install wandb-workspaces\n"
