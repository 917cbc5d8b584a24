"""This section configures where metrics go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_backend.config.section import Section


class TrackingConfig(Section):
    """These settings choose the tracker and configure W&B."""

    kind: Literal["wandb", "tensorboard", "none"] = Field("wandb", alias="tracker", description="where metrics go")
    mode: Literal["offline", "online", "disabled"] = Field("offline", alias="wandb")
    project: str = Field("reef-slime", alias="wandb_project")
    artifacts: bool = Field(
        False, alias="wandb_artifacts", description="at the end, weight versions and rollouts as W&B artifacts"
    )
