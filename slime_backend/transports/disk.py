"""Weights through a checkpoint directory that trainer and engines both see.

The file is written while the engines still generate; the pause only lasts as long as they read it. Since an audit
needs the weights of every version anyway, this transport costs nothing extra where they are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slime_backend.engine_client import EngineClient
from slime_backend.weight_sources import WeightSource


class CheckpointTransport:
    """One checkpoint that somebody else has written, whatever its directory is called."""

    name = "disk"

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Raises FileNotFoundError for a directory without a model: better here than on every engine."""
        if not (self.directory / "config.json").is_file() or not list(self.directory.glob("*.safetensors")):
            raise FileNotFoundError(f"{self.directory}: no Hugging Face checkpoint (config.json and *.safetensors)")

    async def load(self, client: EngineClient, version: str) -> None:
        await client.load_from_disk(str(self.directory))

    async def close(self) -> None:
        return None


class DiskTransport:
    """Writes `root/<version>` through the source, then has each engine load it."""

    name = "disk"

    def __init__(self, source: WeightSource, root: Path) -> None:
        self.source = source
        self.root = root.resolve()  # the engine's working directory isn't ours

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        await asyncio.to_thread(self.source.save, self.root / version)

    async def load(self, client: EngineClient, version: str) -> None:
        await client.load_from_disk(str(self.root / version))

    async def close(self) -> None:
        return None
