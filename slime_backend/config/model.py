"""What a run starts from."""

from __future__ import annotations

from pydantic import Field

from slime_backend.config.section import Section


class ModelConfig(Section):
    """The model of version v0, and the seed of everything that is random."""

    name: str = Field("tiny", alias="model", description="tiny, tiny_hybrid, smollm2, or a directory with a checkpoint")
    models_dir: str = Field("models", description="where models that are made on the spot are kept")
    seed: int = Field(0, ge=0)
