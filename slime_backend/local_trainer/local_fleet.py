"""Real engines on this machine, started from a RunConfig and admitted to a fleet."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from slime_backend.config import RunConfig
from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import EngineSettings, EngineStartError, LocalEngine
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.liveness import look
from slime_backend.local_trainer.devices import place

WATCH_S = 2.0  # between two looks at the engines of `reef-slime up`


def make_engines(config: RunConfig, model: Path, version: str, log_dir: Path) -> list[LocalEngine]:
    """One LocalEngine per `config.engines`, not started. Raises RunError where there are too few GPUs."""
    ports = config.ports or [0] * config.engines
    devices = place(config, trains=False).engines
    return [
        LocalEngine(
            EngineSettings(
                model=str(model.resolve()),
                port=port,
                device=config.device,
                dtype=config.dtype,
                radix_cache=config.radix_cache,
                weight_version=version,
                max_total_tokens=config.max_total_tokens,
                chunked_prefill_size=config.chunked_prefill_size,
                page_size=config.page_size,
                hooks=config.engine_hooks,
                threads=config.engine_threads,
                skip_tokenizer=config.skip_tokenizer,
                extra=config.engine_flags,
                devices=devices[i],
            ),
            log_path=log_dir / f"engine{i}.log",
            name=f"engine{i}",
        )
        for i, port in enumerate(ports)
    ]


@asynccontextmanager
async def running_fleet(
    config: RunConfig, model: Path, version: str, log_dir: Path, say: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    """Start the engines side by side, admit each to a fleet at `version`, stop them all at the end.

    Raises EngineStartError, EngineUnfit or PortOccupiedError, after every started engine was stopped.
    """
    async with started_fleet(make_engines(config, model, version, log_dir), config, version, say) as fleet:
        yield fleet


@asynccontextmanager
async def started_fleet(
    engines: Sequence[LocalEngine], config: RunConfig, version: str, say: Callable[[str], None]
) -> AsyncIterator[Fleet]:
    """`running_fleet` of these engines."""
    keys = config.engine_keys
    for engine in engines:
        engine.check()
    clients: list[EngineClient] = []
    try:
        for engine in engines:
            await asyncio.to_thread(engine.start)
            say(f"{engine.name} starts on {engine.url} (log: {engine.log_path})")
        await asyncio.gather(*(asyncio.to_thread(e.wait_ready, config.engine_ready_s) for e in engines))
        fleet = Fleet(config.policy, version, wait_s=config.engine_wait_s)
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
    config: RunConfig, model: Path, *, say: Callable[[str], None], ready: Callable[[list[str]], None]
) -> None:
    """Start the engines, call `ready` with their URLs, and keep them until this is cancelled.

    Raises EngineStartError when one ends by itself.
    """
    logs = Path(tempfile.mkdtemp(prefix="reef-slime-up-"))
    try:
        engines = make_engines(config, model, "v0", logs)
        async with started_fleet(engines, config, "v0", say) as fleet:
            ready([m.client.url for m in fleet.members.values()])
            await until_one_is_gone([(m.client, e.alive) for m, e in zip(fleet.members.values(), engines, strict=True)])
    except EngineStartError as error:
        # Why an engine ended stands in its log alone.
        raise EngineStartError(f"{error}; the engines' logs are in {logs}") from error
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise


async def until_one_is_gone(engines: Sequence[tuple[EngineClient, Callable[[], bool]]]) -> None:
    """Look at the engines again and again, each with whether its process is alive. Raises EngineStartError."""
    while True:
        await asyncio.sleep(WATCH_S)
        for client, alive in engines:
            found = await look(client, process_alive=alive)
            if found.life == "gone":
                raise EngineStartError(f"{client.name} no longer answers at {client.url}: {found.seen}")
