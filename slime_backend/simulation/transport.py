"""`NameTransport` is the disk transport without a disk: a fake engine loads a name."""

from __future__ import annotations

from collections.abc import Sequence

from slime_backend.engine_client import EngineClient


class NameTransport:
    """This Transport is for fake engines; it moves no bytes."""

    name = "name"

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        return None

    async def load(self, client: EngineClient, version: str) -> None:
        await client.load_from_disk(f"weights/{version}")

    async def close(self) -> None:
        return None
