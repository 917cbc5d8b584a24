"""This module starts real engines on this machine from a configuration and admits them to a fleet."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from slime_backend.config import EnginesConfig
from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import EngineSettings, EngineStartError, LocalEngine
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.liveness import look
from slime_backend.local_trainer.devices import place
from slime_backend.policy import Policy
from slime_backend.run_files import RunDir

WATCH_S = 2.0  # between two checks of the engines of `reef-slime up`


def make_engines(config: EnginesConfig, policy: Policy, model: Path, version: str, log_dir: Path) -> list[LocalEngine]:
    """Make as many LocalEngines as the configuration names, not started. Raises RunError for too few GPUs."""
    ports = config.ports or [0] * config.count
    devices = place(config, None).engines
    return [
        LocalEngine(
            EngineSettings(
                model=str(model.resolve()),
                port=port,
                device=config.device,
                dtype=config.dtype,
                radix_cache=config.radix_cache_under(policy),
                weight_version=version,
                max_total_tokens=config.max_total_tokens,
                chunked_prefill_size=config.chunked_prefill_size,
                page_size=config.page_size,
                hooks=config.hooks_under(policy),
                threads=config.threads,
                skip_tokenizer=config.skip_tokenizer,
                extra=config.flags,
                devices=devices[i],
            ),
            log_path=RunDir(log_dir).engine_log(i),
            name=f"engine{i}",
        )
        for i, port in enumerate(ports)
    ]


@asynccontextmanager
async def running_fleet(
    config: EnginesConfig, policy: Policy, model: Path, version: str, log_dir: Path, log: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    """Start the engines concurrently, admit each to a fleet at `version`, stop them all at the end.

    Raises EngineStartError, EngineUnfit or PortOccupiedError, after every started engine was stopped.
    """
    engines = make_engines(config, policy, model, version, log_dir)
    async with started_fleet(engines, config, policy, version, log) as fleet:
        yield fleet


@asynccontextmanager
async def started_fleet(
    engines: Sequence[LocalEngine], config: EnginesConfig, policy: Policy, version: str, log: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    """Start these engines as `running_fleet` does."""
    keys = config.keys_to_send
    for engine in engines:
        engine.check()
    clients: list[EngineClient] = []
    try:
        for engine in engines:
            await asyncio.to_thread(engine.start)
            log(f"{engine.name} starts on {engine.url} (log: {engine.log_path})")
        await asyncio.gather(*(asyncio.to_thread(e.wait_ready, config.ready_s) for e in engines))
        fleet = Fleet(policy, version, wait_s=config.wait_s)
        for engine in engines:
            client = EngineClient(engine.url, name=engine.name, keys=keys, deadlines=config.deadlines)
            clients.append(client)
            await admit(fleet, client)
        yield fleet
    finally:
        for client in clients:
            await client.close()
        # Off the loop, and all at once: each takes up to its grace period. Shielded from a second Ctrl-C.
        await asyncio.shield(asyncio.gather(*(asyncio.to_thread(e.stop) for e in engines)))


async def serve_engines(
    config: EnginesConfig,
    policy: Policy,
    model: Path,
    *,
    log: Callable[[str], None],
    ready: Callable[[list[str]], None],
) -> None:
    """Start the engines, call `ready` with their URLs, and keep them until this is cancelled.

    Raises EngineStartError when one ends by itself.
    """
    logs = Path(tempfile.mkdtemp(prefix="reef-slime-up-"))
    try:
        engines = make_engines(config, policy, model, "v0", logs)
        async with started_fleet(engines, config, policy, "v0", log) as fleet:
            ready([m.client.url for m in fleet.members.values()])
            await until_one_is_gone([(m.client, e.alive) for m, e in zip(fleet.members.values(), engines, strict=True)])
    except EngineStartError as error:
        # Only its log has the reason why an engine ended.
        raise EngineStartError(f"{error}; the engines' logs are in {logs}") from error
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise


async def until_one_is_gone(engines: Sequence[tuple[EngineClient, Callable[[], bool]]]) -> None:
    """Check the engines repeatedly; raises EngineStartError once one is gone. Each comes with its process's `alive`."""
    while True:
        await asyncio.sleep(WATCH_S)
        for client, alive in engines:
            found = await look(client, process_alive=alive)
            if found.life == "gone":
                raise EngineStartError(f"{client.name} no longer answers at {client.url}: {found.seen}")
