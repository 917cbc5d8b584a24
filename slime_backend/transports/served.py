"""What engines serve and how they were started, by their own reports: what a transport compares with in `prepare`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.weight_sources.checkpoint_check import (
    Checkpoint,
    CheckpointUnfit,
    check_same_model,
    read_checkpoint,
    read_config,
)

# Formats of --load-format whose loader SGLang uses for an update as well (0.5.23, model_loader/loader.py and
# model_executor/model_runner_components/weight_updater.py: any other loader is refused, after the pause).
UPDATABLE_FORMATS = frozenset({"auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"})
Info = Mapping[str, Any]


@dataclass(slots=True)
class ServedModels:
    """The checkpoints that a transport's engines were started with, each read once: it may be removed later."""

    silent: dict[str, str] = field(default_factory=dict)  # engine -> why it has no info, the last time it was asked
    _read: dict[str, Checkpoint | None] = field(default_factory=dict)
    _infos: dict[str, tuple[EngineClient, Any, Info]] = field(default_factory=dict)

    async def infos(self, clients: Sequence[EngineClient]) -> dict[str, Info]:
        """Engine -> its /server_info; without those that don't answer, which the next step names."""
        found = await asyncio.gather(*(self._info(client) for client in clients))
        return {client.name: info for client, info in zip(clients, found, strict=True) if info is not None}

    async def _info(self, client: EngineClient) -> Info | None:
        """Asked for once per process: it takes SGLang tens of milliseconds to write."""
        known = self._infos.get(client.name)
        process = getattr(client, "instances", None)
        if known is not None and known[0] is client and known[1] == process:
            return known[2]
        try:
            info = {k: v for k, v in (await client.server_info()).items() if k != "internal_states"}
        except EngineError as error:
            self.silent[client.name] = error.seen
            return None
        self.silent.pop(client.name, None)
        self._infos[client.name] = (client, process, info)
        return info

    async def checkpoints(self, clients: Sequence[EngineClient]) -> dict[str, Checkpoint]:
        """Engine -> the checkpoint on disk that it was started with, where this machine sees it and the engine's
        digests are those of a CPU (weight_sources/digests.py)."""
        infos = (await self.infos(clients)).items()
        paths = {name: str(info.get("model_path") or "") for name, info in infos if info.get("device") == "cpu"}
        read = {path: await asyncio.to_thread(_served, path) for path in set(paths.values())}
        return {name: found for name, path in paths.items() if (found := read[path]) is not None and found.tensors}

    async def check(self, found: Checkpoint, infos: Iterable[Info]) -> None:
        """Raise CheckpointUnfit unless each engine, so far as this machine sees its model, can load `found`."""
        for path in dict.fromkeys(str(info.get("model_path") or "") for info in infos):
            if path not in self._read:
                self._read[path] = await asyncio.to_thread(_served, path)
            served = self._read[path]
            if served is not None:
                check_same_model(found, served)


def _served(path: str) -> Checkpoint | None:
    """None where this machine doesn't see the model."""
    directory = _directory(path)
    if directory is None or not directory.is_dir():
        return None
    try:
        return read_checkpoint(directory)
    except CheckpointUnfit:  # its weights lie in another format, or elsewhere: the config is there in any case
        try:
            return Checkpoint(str(directory), {}, read_config(directory))
        except CheckpointUnfit:
            return None


def _directory(path: str) -> Path | None:
    """An absolute path is one; the name of a model on the hub is where Hugging Face's programs have put it."""
    if Path(path).is_absolute():
        return Path(path)
    if path.count("/") != 1:
        return None  # relative to a working directory that isn't ours
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(path, "config.json")
    except (ImportError, ValueError):  # ValueError: not a name that the hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None


# ---- engines that a transport can't serve ---------------------------------------------------------------------------


def why_no_update(info: Info) -> str | None:
    """Why no update of weights, by whatever way, can reach an engine that was started so."""
    mode = info.get("weight_cache_mode")
    if mode not in (None, "", "off"):
        return (
            f"--weight-cache-mode {mode} shares its weights with other engines, and an update ends it; start it with "
            "--weight-cache-mode off"
        )
    return None


def why_not_from_disk(info: Info) -> str | None:
    """Why an engine can't load a checkpoint while it runs."""
    if why := why_no_update(info):
        return why
    form = str(getattr(info.get("load_format"), "value", info.get("load_format")) or "auto").lower()
    if form not in UPDATABLE_FORMATS and form != "dummy":
        return (
            f"it was started with --load-format {form}, whose loader SGLang doesn't use for updates; start it with "
            "--load-format auto"
        )
    return None


def why_no_group(info: Info) -> str | None:
    """Why an engine can't take tensors from a process group or from memory."""
    if why := why_no_update(info):
        return why
    ranks = int(info.get("dp_size") or 1)
    # With attention DP the ranks are tensor ranks of one engine (0.5.23 reports a dp_size of 1 then, 0.5.15 allows it).
    if ranks > 1 and not info.get("enable_dp_attention"):
        return (
            f"it has {ranks} data-parallel ranks (--dp-size), for which SGLang takes weights from disk only; use the "
            "disk transport, or one engine per rank"
        )
    return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def why_unreachable(url: str, host: str) -> str | None:
    """Why the engine at `url` can't connect to `host`, as far as the addresses tell."""
    engine = urlsplit(url).hostname or ""
    if is_loopback(host) and not is_loopback(engine) and not _is_here(engine):
        return (
            f"it would have to join the group at {host}, which is its own machine as seen from {engine}; give the "
            "transport a `host` that the engine reaches"
        )
    return None


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: only then can a socket be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def local_address(url: str) -> str:
    """The address of this machine from which the engine at `url` is reached, and so can reach back. Sends nothing.

    Raises OSError where there is no way to it.
    """
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname or "", parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
