"""Weights through a checkpoint directory that trainer and engines both see.

The file is written while the engines still generate; the pause only lasts as long as they read it. Since an audit
needs the weights of every version anyway, this transport costs nothing extra where they are kept.

Before anybody pauses, the checkpoint is compared with itself and with what the engines serve (checkpoint_check.py).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_backend.engine_client import EngineClient
from slime_backend.run_files.replace import partial_name
from slime_backend.transports.base import Refused
from slime_backend.transports.served import ServedModels, why_not_from_disk
from slime_backend.weight_sources import WeightSource
from slime_backend.weight_sources.base import headers_of
from slime_backend.weight_sources.checkpoint_check import (
    Checkpoint,
    CheckpointUnfit,
    check_finite,
    read_checkpoint,
)
from slime_backend.weight_sources.digests import Forms, of_checkpoint
from slime_backend.weight_sources.same_content import why_other_content


class _FromDisk:
    """What both transports do with engines and a checkpoint on disk."""

    name = "disk"

    def __init__(self, *, compare: bool, finite: bool) -> None:
        """`compare`: with the checkpoint that the engines were started with. `finite`: read every byte for NaN."""
        self._compare, self._finite = compare, finite
        self._served = ServedModels()
        self._refused: dict[str, Refused] = {}
        self._formats: dict[str, str] = {}  # engine -> what it must be asked for instead of its own
        self._digest_bytes = 0.0  # of a checkpoint that may be digested
        self._digests: dict[str, Forms] | None = None

    async def _meet(self, clients: Sequence[EngineClient]) -> None:
        """Ask the engines how they were started, before anything is written."""
        self._refused.clear()
        self._formats.clear()
        for name, info in (await self._served.infos(clients)).items():
            if why := why_not_from_disk(info):
                self._refused[name] = Refused(why)
            elif str(info.get("load_format")) == "dummy":  # random weights until the first publication
                self._formats[name] = "auto"

    async def _check(self, directory: Path, clients: Sequence[EngineClient]) -> Checkpoint:
        """Raises CheckpointUnfit."""
        found = await asyncio.to_thread(read_checkpoint, directory)
        await self._check_served(found, clients)
        if self._finite:
            await asyncio.to_thread(check_finite, found)
        small = found.nbytes <= self._digest_bytes
        self._digests = await asyncio.to_thread(of_checkpoint, found) if small else None
        return found

    def expect_digests(self, ahead_bytes: float, paused_bytes: float) -> None:
        self._digest_bytes = ahead_bytes

    async def digests(self) -> Mapping[str, Sequence[str]] | None:
        """Of the checkpoint that was prepared last."""
        return self._digests

    async def _check_served(self, found: Checkpoint, clients: Sequence[EngineClient]) -> None:
        if self._compare:
            infos = await self._served.infos([c for c in clients if c.name not in self._refused])
            await self._served.check(found, infos.values())

    async def _load(self, client: EngineClient, directory: Path) -> None:
        if client.name in self._formats:
            await client.load_from_disk(str(directory), self._formats[client.name])
        else:
            await client.load_from_disk(str(directory))

    def why_not(self, client: EngineClient) -> Refused | None:
        return self._refused.get(client.name)

    async def close(self) -> None:
        return None


class CheckpointTransport(_FromDisk):
    """One checkpoint that somebody else has written, whatever its directory is called."""

    def __init__(self, directory: Path, *, compare: bool = True, finite: bool = False) -> None:
        super().__init__(compare=compare, finite=finite)
        self.directory = directory.resolve()

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Raises CheckpointUnfit for a directory that the engines can't load, or would load in part."""
        await self._meet(clients)
        await self._check(self.directory, clients)

    async def load(self, client: EngineClient, version: str) -> None:
        await self._load(client, self.directory)


class DiskTransport(_FromDisk):
    """Writes `root/<version>` through the source, then has each engine load it.

    A directory of that name that is there already is taken for the version only if it holds the source's weights, byte
    for byte; `saved=True`: the caller itself has just saved them there, so they aren't compared again.
    """

    def __init__(
        self,
        source: WeightSource,
        root: Path,
        *,
        saved: bool = False,
        compare: bool = True,
        finite: bool = False,
    ) -> None:
        super().__init__(compare=compare, finite=finite)
        self.source = source
        self.root = root.resolve()  # the engine's working directory isn't ours
        self._saved = saved

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Raises CheckpointUnfit where the directory holds other weights, or the source isn't what the engines serve.

        A cancellation waits for the thread that writes and leaves no directory of the version's name.
        """
        directory = self._directory(version)
        await self._meet(clients)
        headers = headers_of(self.source)
        if headers is not None:  # before all of it is written
            await self._check_served(headers, clients)
        if not os.path.lexists(directory):
            await self._write(directory, clients)
            return
        if not self._saved:
            why = await asyncio.to_thread(why_other_content, directory, self.source)
            if why:
                raise CheckpointUnfit(
                    f"{directory} is taken: {why}; publish under a name that wasn't used, or remove the directory if "
                    "nothing refers to it"
                )
        await self._check(directory, clients)

    async def _write(self, directory: Path, clients: Sequence[EngineClient]) -> None:
        """Under another name until it is complete and checked: what has the version's name is a version."""
        partial = partial_name(directory)
        try:
            await _awaited(self.source.save, partial)
            await self._check(partial, clients)
            try:
                partial.rename(directory)
            except OSError as error:
                raise CheckpointUnfit(f"{directory} is taken: it was made while its weights were written") from error
        finally:
            if partial.exists():
                await _awaited(shutil.rmtree, partial, True)

    def _directory(self, version: str) -> Path:
        if not version or Path(version).name != version or version.startswith("."):
            raise CheckpointUnfit(f"version {version!r} is no name of a directory below {self.root}; use another name")
        return self.root / version

    async def load(self, client: EngineClient, version: str) -> None:
        await self._load(client, self.root / version)


async def _awaited(function: Callable[..., object], *args: Any) -> None:
    """Run `function` on a thread and wait for its end even if this task is cancelled: a thread can't be stopped."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        work.exception()  # read, so that nobody reports it as lost
        raise asyncio.CancelledError
    work.result()
