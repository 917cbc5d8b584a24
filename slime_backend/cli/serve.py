"""`reef-slime serve` runs the gateway in front of running engines; `export` writes its turns as a ledger."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_backend.cli.options import AsJson, Config, Overrides, fail, load_settings


def serve(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run the gateway in front of running engines (gateway.engines) until interrupted. See docs/gateway.md."""
    settings = load_settings(config, overrides)
    gateway_module().serve(settings, str(config), as_json)


def export_turns(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a gateway's run directory, e.g. runs/gateway")],
    store: Annotated[str | None, typer.Option(metavar="URL", help="default: sqlite in the run directory")] = None,
) -> None:
    """Write a gateway's turns as the ledger of its run directory, which audit, rollouts and report read."""
    typer.echo(gateway_module().export(run_dir, store))


def gateway_module() -> Any:
    """Import `slime_backend.cli.gateway`; fail with one line where a package that it needs is missing."""
    try:
        return importlib.import_module("slime_backend.cli.gateway")
    except ModuleNotFoundError as error:
        fail(f"the gateway needs {error.name}, which is not installed: pip install 'reef-slime[service]'")
