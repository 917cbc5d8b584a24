"""`--reef-save-weights`: a version's directory has that save and nothing else, or isn't there. slime's saver is a
stand-in that writes one file after the other, as slime's does: into a directory that may be there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slime_backend.run_files import RunDir
from slime_backend.slime_hooks.weights import saved_weights


class Saver:
    """slime's `save_hf_model_to_path`."""

    def __init__(self) -> None:
        self.asked: list[Path] = []
        self.fails_after: int | None = None

    def __call__(self, args, output_dir, model) -> None:
        self.asked.append(Path(output_dir))
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(("config.json", "model-00001-of-00001.safetensors")):
            if number == self.fails_after:
                raise OSError("disk full")
            (Path(output_dir) / name).write_text(str(model))


@pytest.fixture
def saver(monkeypatch) -> Saver:
    saver = Saver()
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = ModuleType("slime.backends.megatron_utils.hf_checkpoint_saver")
    module.save_hf_model_to_path = saver
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return saver


def actor(tmp_path: Path, *, rank: int, monkeypatch, keep: int | None = None):
    """A rank of slime's trainer, patched, at version 0."""
    updater = SimpleNamespace(weight_version=0)

    class MegatronTrainRayActor:
        def update_weights(self):
            updater.weight_version += 1
            self.model = f"weights {updater.weight_version}"

    saved_weights.save_published(SimpleNamespace(MegatronTrainRayActor=MegatronTrainRayActor))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    made: Any = MegatronTrainRayActor()
    made.args = SimpleNamespace(
        reef_save_weights=True,
        reef_run_dir=str(tmp_path / "run"),
        hf_checkpoint=str(tmp_path / "base"),
        reef_keep_versions=keep,
    )
    made.weight_updater = updater
    return made


def contents(directory: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in directory.iterdir()}


SAVED = dict.fromkeys(("config.json", "model-00001-of-00001.safetensors"), "weights 1")


def test_what_was_there_is_not_mixed_into_a_version(tmp_path, saver, monkeypatch):
    """Of an earlier life of the run: files that the new save doesn't write over would be loaded with it."""
    weights = RunDir(tmp_path / "run").all_weights
    (weights / "1").mkdir(parents=True)
    (weights / "1" / "model-00002-of-00002.safetensors").write_text("older weights")
    actor(tmp_path, rank=0, monkeypatch=monkeypatch).update_weights()
    assert contents(weights / "1") == SAVED
    assert sorted(p.name for p in weights.iterdir()) == ["1", "default"]


@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_fails_half_way_leaves_no_version(tmp_path, saver, monkeypatch, there):
    weights = RunDir(tmp_path / "run").all_weights
    if there:
        (weights / "1").mkdir(parents=True)
        (weights / "1" / "config.json").write_text("older")
    trainer = actor(tmp_path, rank=0, monkeypatch=monkeypatch)
    saver.fails_after = 1
    with pytest.raises(OSError, match="disk full"):
        trainer.update_weights()
    assert contents(weights / "1") == {"config.json": "older"} if there else not (weights / "1").exists()
    # What it left isn't mixed into the next attempt either.
    (saver.asked[0] / "left").write_text("by the one that failed")
    saver.fails_after, trainer.weight_updater.weight_version = None, 0
    trainer.update_weights()
    assert contents(weights / "1") == SAVED


def test_all_ranks_save_under_one_name_and_the_first_one_gives_it_to_the_version(tmp_path, saver, monkeypatch):
    weights = RunDir(tmp_path / "run").all_weights
    actor(tmp_path, rank=1, monkeypatch=monkeypatch).update_weights()
    assert not (weights / "1").exists()
    actor(tmp_path, rank=0, monkeypatch=monkeypatch).update_weights()
    assert saver.asked[0] == saver.asked[1]
    assert saver.asked[0].parent == weights  # the same file system, so that the renaming is one step
    assert contents(weights / "1") == SAVED


def test_the_last_versions_are_kept(tmp_path, saver, monkeypatch):
    trainer = actor(tmp_path, rank=0, monkeypatch=monkeypatch, keep=2)
    for _ in range(4):
        trainer.update_weights()
    assert sorted(p.name for p in RunDir(tmp_path / "run").all_weights.iterdir()) == ["3", "4", "default"]
