"""This runs `reef-slime serve`, `up` with a gateway, and `export`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path

import typer

from reef_service.app import make_app
from reef_service.config import GatewayConfig, gateway_config
from reef_service.descriptors import connections_that_fit
from reef_service.gateway import join_engines, running_gateway
from reef_service.server import serving
from reef_service.store import open_records, open_store
from reef_service.supervisor import Supervisor
from slime_backend import event_loop
from slime_backend.command_line import command
from slime_backend.config import ConfigError, EnginesConfig, ModelConfig, RunConfig
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet
from slime_backend.ledger.files import read_rollouts
from slime_backend.ledger.writer import Ledger
from slime_backend.policy import Policy
from slime_backend.run_files import RunDir


def serve(settings: RunConfig, where: str, as_json: bool) -> None:
    """Run the gateway for engines that are already running."""
    config = gateway_config(settings.gateway, where)
    connections_that_fit(config, len(config.engines))  # before anything is started
    event_loop.run_until_signal(
        _serve(settings.engines, settings.policy, settings.model.name, settings.run_dir, config, as_json)
    )


def up(settings: RunConfig, where: str, as_json: bool) -> None:
    """Start the engines and the gateway."""
    config = gateway_config(settings.gateway, where)
    if config.engines:
        raise ConfigError(
            f"{where}: gateway.engines names running engines; `up` starts its own: use `serve`, or drop it"
        )
    connections_that_fit(config, settings.engines.count)  # before anything is started
    event_loop.run_until_signal(
        _up(settings.engines, settings.policy, settings.model, settings.run_dir, config, as_json)
    )


def export(run_dir: Path, store_url: str | None) -> str:
    """Append the turns that the ledger of `run_dir` lacks; returns what was done, in one line. The gateway may run."""
    if store_url is None and not RunDir(run_dir).gateway_store.is_file():
        raise ConfigError(
            f"{run_dir} has no {RunDir(run_dir).gateway_store.name}; give a gateway's run directory, or --store URL"
        )
    known = {row["receipt"] for row in read_rollouts(run_dir)}
    added = 0
    with open_records(store_url or _default_store(run_dir)) as records, Ledger(run_dir) as ledger:
        for record in records:
            if record.receipt not in known:
                ledger.append(record)
                added += 1
    return f"{added} turns added to the {len(known)} in {run_dir}; {command('audit', run_dir)} recomputes them"


async def _serve(
    engines: EnginesConfig, policy: Policy, model: str, run_dir: Path, config: GatewayConfig, as_json: bool
) -> None:
    clients: list[EngineClient] = []
    try:
        fleet = await join_engines(
            policy,
            config.engines,
            clients,
            keys=engines.keys_to_send,
            deadlines=engines.deadlines,
            wait_s=engines.wait_s,
        )
        directory = await _tokenizer_directory(model, clients[0])
        await _run(run_dir, config, fleet, directory, as_json)
    finally:
        for client in clients:
            await client.close()


async def _up(
    settings: EnginesConfig, policy: Policy, start: ModelConfig, run_dir: Path, config: GatewayConfig, as_json: bool
) -> None:
    from slime_backend.local_trainer.local_fleet import make_engines, started_fleet
    from slime_backend.local_trainer.loop import base_model

    model = base_model(start)
    log = (lambda text: None) if as_json else typer.echo
    engines = make_engines(settings, policy, model, "v0", run_dir)
    async with started_fleet(engines, settings, policy, "v0", log) as fleet:
        keeping = asyncio.create_task(Supervisor(fleet, engines, settings.ready_s).run())
        try:
            await _run(run_dir, config, fleet, model, as_json)
        finally:
            keeping.cancel()  # before the engines are stopped, which is intended
            await asyncio.gather(keeping, return_exceptions=True)


async def _run(run_dir: Path, config: GatewayConfig, fleet: Fleet, model: Path, as_json: bool) -> None:
    """Serve until this is cancelled."""
    with open_store(config.store or _default_store(run_dir)) as store:
        async with (
            running_gateway(config, fleet, model, store, run_dir) as gateway,
            serving(make_app(gateway), config.host, config.port, gateway.connections) as url,
        ):
            if as_json:
                engines = [m.client.url for m in fleet.members.values()]
                ready = {
                    "gateway": url,
                    "engines": engines,
                    "policy": str(fleet.policy),
                    "weight_version": fleet.version,
                }
                typer.echo(json.dumps(ready))
            else:
                typer.echo(f"gateway: {url}  (page at /, API at /docs, metrics at /metrics; Ctrl-C stops it)")
            sys.stdout.flush()
            # The objects made until now stay: each collection that visits them stops all streams for 0.1 s.
            gc.collect()
            gc.freeze()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.shield(gateway.stop())


async def _tokenizer_directory(model: str, client: EngineClient) -> Path:
    """Return the tokenizer's directory: `model` where it has one, else what the engine reports that it serves."""
    if (Path(model) / "tokenizer.json").is_file():
        return Path(model)
    info = await client.call("GET", "/model_info")
    served = Path(str(info.get("tokenizer_path") or info.get("model_path") or ""))
    if (served / "tokenizer.json").is_file():
        return served
    raise ConfigError(
        f"model={model!r} is no directory with a tokenizer.json, and neither is what the engine serves "
        f"({served}); set model to the model's directory"
    )


def _default_store(run_dir: Path) -> str:
    return f"sqlite:///{RunDir(run_dir.resolve()).gateway_store}"
