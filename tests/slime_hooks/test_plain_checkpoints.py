"""Checkpoints of slime that hold an object of ours, as version 0.1 wrote them, made plain by the documented command."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_backend.policy import decide
from slime_backend.slime_hooks.plain_checkpoints import main

torch = pytest.importorskip("torch")

LOAD = """
import sys, torch
sys.path[:] = [p for p in sys.path if "reef" not in p]
sys.modules["slime_backend"] = None
content = torch.load(sys.argv[1], weights_only=False)
print(sorted(vars(content["args"])), content["iteration"], content["model"]["w"].tolist())
"""


def written(root: Path, **ours: Any) -> Path:
    """A checkpoint's common file, as Megatron-core writes it."""
    path = root / "iter_0000001" / "common.pt"
    path.parent.mkdir(parents=True)
    args = argparse.Namespace(lr=1e-3, disjoint_prefix_sharing="retract", **ours)
    torch.save({"args": args, "iteration": 1, "model": {"w": torch.ones(2)}}, path)
    return path


def load_elsewhere(path: Path) -> subprocess.CompletedProcess[str]:
    """In a process that has no reef-slime."""
    return subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=120)


def test_an_old_checkpoint_loads_everywhere_once_it_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = written(tmp_path, reef_policy=decide("disjoint", "retract"))
    assert "slime_backend" in load_elsewhere(path).stderr  # the control
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert main([str(tmp_path)]) == 0
    assert f"{path} holds slime's own arguments alone now" in capsys.readouterr().out
    loaded = load_elsewhere(path)
    assert loaded.stdout == "['disjoint_prefix_sharing', 'lr'] 1 [1.0, 1.0]\n", loaded.stderr
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path, weights_only=True)["args"].lr == 1e-3
    assert main([str(tmp_path)]) == 0
    assert "nothing of reef-slime" in capsys.readouterr().out


def test_a_checkpoint_of_now_is_plain(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    assert main([str(tmp_path)]) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["/nowhere"]])
def test_wrong_use_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_not_known_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = written(tmp_path, other=decide("disjoint", "off"))
    before = path.read_bytes()
    assert main([str(tmp_path)]) == 1
    assert "outside of the arguments in a .pt file" in capsys.readouterr().out
    assert path.read_bytes() == before
