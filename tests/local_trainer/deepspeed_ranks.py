"""Ranks of a DeepSpeed step on given samples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slime_backend.local_trainer.deepspeed_step import deepspeed_step, make_deepspeed_engine
from slime_backend.local_trainer.grpo import GrpoConfig, Sample
from slime_backend.simulation.models import load_model
from slime_backend.weight_sources.deepspeed_zero import DeepSpeedZeroSource


def steps(
    rank: int, folder: Path, *, checkpoint: str, stage: int, config: dict[str, Any], batches: list[Any]
) -> list[dict[str, Any]]:
    """The metrics of one step per batch; the weights after each are saved as v1, v2, ..."""
    grpo, model = GrpoConfig(**config), load_model(checkpoint)
    torch.manual_seed(0)
    engine = make_deepspeed_engine(model, grpo, stage)
    source = DeepSpeedZeroSource(engine, Path(checkpoint), model=model)
    found = []
    for number, batch in enumerate(batches, 1):
        groups = [[Sample(**sample) for sample in group] for group in batch]
        found.append(asdict(deepspeed_step(engine, groups, grpo)))
        if rank:
            source.follow()
        else:
            with source.leading():
                source.save(folder / f"v{number}")
    return found
