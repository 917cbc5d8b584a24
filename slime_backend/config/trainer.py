"""This section configures the trainer: how long, how fast, on which rollouts and on what hardware."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_backend.config.section import Section
from slime_backend.provenance.staleness import StalenessPolicy


class TrainerConfig(Section):
    """These settings have the steps, the optimizer, the treatment of stale tokens, and the trainer's hardware."""

    steps: int = Field(16, ge=1)
    learning_rate: float = Field(1e-2, gt=0)
    ratio_bound: float = Field(2.0, ge=1)
    staleness: StalenessPolicy = Field("correct", description="what happens to tokens over max_version_lag")
    max_version_lag: int | None = Field(None, ge=0, description="publications between sampling and training; none: any")
    ratio_low: float = Field(0.5, ge=0, le=1, description="staleness=correct masks a token whose ratio is under this")
    ratio_high: float = Field(5.0, ge=1, description="or over this")
    kind: Literal["torch", "deepspeed"] = Field(
        "torch", alias="trainer", description="deepspeed: pip install 'reef-slime[deepspeed]'"
    )
    zero_stage: Literal[1, 2, 3] = Field(2, description="for trainer=deepspeed: what is partitioned over its processes")
    processes: int = Field(
        1, alias="trainer_processes", ge=1, le=64, description="for trainer=deepspeed; each trains on its share"
    )
    threads: int = Field(1, alias="trainer_threads", ge=1, description="per process")
    device: str | None = Field(
        None,
        alias="trainer_device",
        pattern=r"^(cpu|cuda|cuda:[0-9]+)$",
        description="for trainer=torch; none: the GPU after the engines' with device=cuda, else the CPU",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        if self.staleness != "correct" and self.max_version_lag is None:
            raise ValueError(f"staleness={self.staleness} does nothing without a bound; give max_version_lag as well")
        if self.processes > 1 and self.kind != "deepspeed":
            raise ValueError(f"trainer_processes={self.processes} needs trainer=deepspeed; trainer={self.kind} has one")
        if self.kind == "deepspeed" and (self.device or "cpu") != "cpu":
            raise ValueError(f"trainer_device={self.device}: trainer=deepspeed trains on the CPU; leave it out")
        return self
