"""`Trainer` is what the loop needs of a trainer; `TorchTrainer` has the model in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_backend.config import TrainerConfig
from slime_backend.local_trainer.checkpoint import save_trainer_state
from slime_backend.local_trainer.grpo import GrpoConfig, Sample, grpo_step, make_optimizer
from slime_backend.simulation import models
from slime_backend.tracking.columns import StepMetrics
from slime_backend.weight_sources import WeightSource
from slime_backend.weight_sources.torch_module import TorchModuleSource


class Trainer(Protocol):
    @property
    def source(self) -> WeightSource: ...

    def step(self, groups: Sequence[Sequence[Sample]]) -> StepMetrics:
        """Update the model once on complete groups; see `grpo_step`."""

    def save_state(self, run_dir: Path, step: int) -> None:
        """Save what a resumed run needs besides the weights of `step`, which are saved before this is called."""

    def close(self) -> None: ...


def make_trainer(
    config: TrainerConfig,
    seed: int,
    device: str,
    weights: Path,
    template: Path,
    run_dir: Path,
    state: dict[str, Any] | None,
) -> Trainer:
    """Make the trainer that the config names.

    `device`: of torch, for a trainer in this process. `weights`: the checkpoint to go on from. `state`: what
    `load_trainer_state` read of `run_dir`, None at the start.

    Raises RunError where the trainer can't start, or the state is another trainer's.
    """
    grpo = GrpoConfig(
        learning_rate=config.learning_rate,
        ratio_bound=config.ratio_bound,
        ratio_low=config.ratio_low,
        ratio_high=config.ratio_high,
    )
    if config.kind == "deepspeed":
        from slime_backend.local_trainer.deepspeed_trainer import DeepSpeedTrainer

        return DeepSpeedTrainer(config, seed, grpo, weights, template, run_dir, state)
    return TorchTrainer(grpo, weights, template, state, device)


def check_trainer(config: TrainerConfig) -> None:
    """Raise RunError where the trainer's package is missing."""
    if config.kind == "deepspeed":
        from slime_backend.local_trainer.deepspeed_step import deepspeed

        deepspeed("cpu")


class TorchTrainer:
    """This trainer has the complete model in this process."""

    def __init__(
        self, grpo: GrpoConfig, weights: Path, template: Path, state: dict[str, Any] | None, device: str = "cpu"
    ) -> None:
        self.grpo = grpo
        self.model = models.load_model(weights, device)
        self.optimizer = make_optimizer(self.model, grpo)
        if state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.source = TorchModuleSource(self.model, template)

    def step(self, groups: Sequence[Sequence[Sample]]) -> StepMetrics:
        return grpo_step(self.model, self.optimizer, groups, self.grpo)

    def save_state(self, run_dir: Path, step: int) -> None:
        save_trainer_state(run_dir, {"trainer": "torch", "step": step, "optimizer": self.optimizer.state_dict()})

    def close(self) -> None:
        return None
