"""`reef-slime train` does a run on this machine; `reef-slime up` starts its engines alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from slime_backend import event_loop
from slime_backend.cli.options import AsJson, Config, Overrides, fail, load_settings
from slime_backend.cli.serve import gateway_module
from slime_backend.run_files import RunDir


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="go on with this run")] = None,
    max_version_lag: Annotated[
        int | None, typer.Option(metavar="N", help="publications that may lie between sampling and training")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(metavar="POLICY", help="beyond that: drop, mask_tokens or correct (default)")
    ] = None,
) -> None:
    """Run asynchronous GRPO on this machine: a local trainer, live engines, a publication at every step, an audit."""
    flags = {"max_version_lag": max_version_lag, "staleness": staleness}
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    settings = load_settings(config, [*(overrides or ()), *given], trains=True)
    from slime_backend.cli.console import console_reporter, print_summary
    from slime_backend.local_trainer.loop import choose_run_dir
    from slime_backend.local_trainer.loop import train as run

    run_dir = choose_run_dir(settings.run_dir, resume)
    with console_reporter() as reporter:
        reporter.log(f"run directory: {run_dir}")
        summary = event_loop.run_until_signal(run(settings, run_dir, resume=resume is not None, reporter=reporter))
    print_summary(summary, run_dir)
    audit = summary["audit"]
    if audit and audit["violations"]:
        fail(
            f"the audit found {audit['violations']} violations in {audit['rollouts']} rollouts; "
            f"{RunDir(run_dir).audit} names them"
        )


def up(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Start the engines of a config, and the gateway if it has a section `gateway`; keep them until interrupted."""
    settings = load_settings(config, overrides)
    if settings.gateway is not None:
        gateway_module().up(settings, str(config), as_json)
        return
    from slime_backend.local_trainer.local_fleet import serve_engines
    from slime_backend.local_trainer.loop import base_model

    def ready(urls: list[str]) -> None:
        if as_json:
            typer.echo(json.dumps({"engines": urls, "policy": str(settings.policy), "weight_version": "v0"}))
        else:
            typer.echo("ready: " + " ".join(urls) + "  (Ctrl-C stops them)")
        sys.stdout.flush()

    log = (lambda text: None) if as_json else typer.echo
    event_loop.run_until_signal(
        serve_engines(settings.engines, settings.policy, base_model(settings.model), log=log, ready=ready)
    )
