"""This module reads and writes trainer checkpoints.

The weights of version v<k> are saved before they are published, so a resumed run never has to make a version a second
time, under a name that rollouts already have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slime_backend.errors import RunError
from slime_backend.run_files import RunDir, replace_file
from slime_backend.run_files.directory import remove_weights
from slime_backend.run_files.replace import remove_partials
from slime_backend.run_files.rows import sound_rows
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit, check_same_config


def version_name(step: int) -> str:
    return f"v{step}"


def forget_unpublished(weights: Path, step: int) -> None:
    """Remove the versions after `step`, and what a killed writer of any version left.

    A run that ended between the weights and the state of a step never published those versions, and makes other weights
    of that name when it goes on.
    """
    for directory in weights.glob("v*"):
        number = directory.name.removeprefix("v")
        if number.isdecimal() and int(number) > step:  # other files of a user stay
            remove_weights(directory)
    remove_partials(weights, "v*")


def version_step(version: str) -> int:
    return int(version.removeprefix("v"))


def save_trainer_state(run_dir: Path, state: dict[str, Any]) -> None:
    """Save what the trainer needs to go on: `state`, with "trainer", its name in the config, and "step".

    The weights are in `weights/v<step>`, saved before this is called.
    """
    # Durable: a power cut must not leave the new name with nothing behind it.
    replace_file(RunDir(run_dir).trainer_state, lambda file: torch.save(state, file), durable=True)


def load_trainer_state(run_dir: Path) -> dict[str, Any] | None:
    """Return what `save_trainer_state` was given, or None where the run has no checkpoint yet.

    Raises RunError for a damaged one.
    """
    path = RunDir(run_dir).trainer_state
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")  # optimizers move it
        int(state["step"])
    except Exception as error:  # torch raises whatever its unpickler meets in a damaged file
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RunError(f"{path} is damaged ({why}); put a copy back, or begin a new run") from error
    return state


def check_resumable(run_dir: Path, state: dict[str, Any] | None, base: Path) -> None:
    """Raise RunError where going on would make a version a second time, or with another model. Changes nothing."""
    run = RunDir(run_dir)
    if state is None:
        published = [row["version"] for row in sound_rows(run.publications) if row["state"] == "resumed"]
        if published:
            raise RunError(
                f"{run_dir} has published {published[-1]}, and its {run.trainer_state.name} is gone: what it goes on "
                "from isn't known, and names of versions stand for one set of weights; put a copy back, or begin a new "
                "run"
            )
        return
    saved = run.weights(version_name(state["step"]))
    try:
        check_same_config(saved, base)
    except CheckpointUnfit as error:
        raise RunError(f"{run_dir} can't go on with this model: {error}") from error
