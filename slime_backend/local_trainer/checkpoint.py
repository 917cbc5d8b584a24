"""Trainer checkpoints. The weights of version v<k> are saved before they are published, so a run that is resumed
never has to make a version a second time, under a name that rollouts already bear."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

CHECKPOINT = "trainer.pt"


def version_name(step: int) -> str:
    return f"v{step}"


def forget_unpublished(weights: Path, step: int) -> None:
    """Remove the versions after `step`: a run that ended between the weights and the state of a step never published
    them, and comes to other weights of that name when it goes on."""
    for directory in weights.glob("v*"):
        number = directory.name.removeprefix("v")
        if number.isdecimal() and int(number) > step:  # whatever else a user keeps there stays
            shutil.rmtree(directory)


def version_step(version: str) -> int:
    return int(version.removeprefix("v"))


def save_trainer_state(run_dir: Path, state: dict[str, Any]) -> None:
    """`state`: what the trainer needs to go on, with "trainer", its name in the config, and "step". The weights lie in
    `weights/v<step>`, saved before this is called."""
    partial = run_dir / f".{CHECKPOINT}.partial"
    torch.save(state, partial)
    partial.rename(run_dir / CHECKPOINT)


def load_trainer_state(run_dir: Path) -> dict[str, Any] | None:
    """What `save_trainer_state` was given, or None where the run has no checkpoint yet."""
    path = run_dir / CHECKPOINT
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(
        path, weights_only=True, map_location="cpu"
    )  # optimizers take it to their own device
    return state
