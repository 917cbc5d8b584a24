"""This section configures what the engines generate, and how many rollouts are in flight."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_backend.config.section import Section


class TaskConfig(Section):
    """These settings choose the task, its groups of rollouts, and the ledger that they are written to."""

    name: Literal["character_kinds", "bare_sums"] = Field("character_kinds", alias="task")
    groups_per_step: int = Field(9, ge=1)
    samples_per_group: int = Field(8, ge=2)
    groups_ahead: int = Field(9, ge=0, description="groups that may be generated beyond the batch being trained")
    temperature: float = Field(
        1.0, ge=1e-6, allow_inf_nan=False, description="under 1e-6 is greedy: nothing to train on"
    )
    segment_mib: float = Field(
        16,
        alias="rollouts_segment_mib",
        gt=0,
        description="size of rollouts.jsonl at which it becomes a Parquet segment",
    )
