"""This section configures what a run starts from."""

from __future__ import annotations

from pydantic import Field

from slime_backend.config.section import Section


class ModelConfig(Section):
    """A run starts from this model as version v0, and with this seed for everything random."""

    name: str = Field("tiny", alias="model", description="tiny, tiny_hybrid, smollm2, or a directory with a checkpoint")
    models_dir: str = Field("models", description="where models that a run makes are kept")
    seed: int = Field(0, ge=0)
