"""Weights that lie on a disk the engines read: slime's full and delta updates by disk, as a Transport.

With a local checkpoint per host the engines first bring that up to date (slime's `pull_weights`), while they still
generate; an engine that can't is the only one that fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slime_backend.engine_client import EngineClient
from slime_backend.slime_hooks.engines.ray_engines import RayEngine
from slime_backend.slime_hooks.weights.publisher import name_of
from slime_backend.transports import TransportError
from slime_backend.transports.served import ServedModels
from slime_backend.weight_sources.checkpoint_check import read_checkpoint


class DiskReload:
    """For one publication. `directory` is a path on the engines' hosts."""

    def __init__(self, directory: str, *, pull: int | None = None, engines: Sequence[RayEngine] = ()) -> None:
        """`pull`: the version that `engines` bring their local checkpoint to first; None: nothing to pull."""
        self.name = "disk" if pull is None else "local disk"
        self._directory, self._pull = directory, pull
        self._engines = {name_of(engine.url): engine for engine in engines}
        self._not_pulled: dict[str, str] = {}

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Raises CheckpointUnfit for a directory that the engines would load in part, or that would end them."""
        if self._pull is not None:
            await asyncio.gather(*(self._bring(client.name, self._pull) for client in clients))
        directory = Path(self._directory)
        if directory.is_dir() and any(
            directory.iterdir()
        ):  # without the file system it may be an empty mount point here
            served = ServedModels()
            found = await asyncio.to_thread(read_checkpoint, directory)
            await served.check(found, (await served.infos(clients)).values())

    async def _bring(self, name: str, version: int) -> None:
        try:
            await asyncio.to_thread(self._engines[name].pull_weights, version)
        except Exception as error:  # whatever the actor raised, and Ray's own
            self._not_pulled[name] = f"it didn't bring its local checkpoint to {version}: {_last_line(error)}"

    async def load(self, client: EngineClient, version: str) -> None:
        if client.name in self._not_pulled:
            raise TransportError(client.name, self._not_pulled[client.name])
        await client.load_from_disk(self._directory)

    async def close(self) -> None:
        return None


def _last_line(error: Exception) -> str:
    """Of an error with Ray's traceback in its text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
