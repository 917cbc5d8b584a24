"""`reef-slime audit`: this has the options; audit_run.py runs the audit, and imports torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from slime_backend.cli.options import AsJson, fail
from slime_backend.run_files import RunDir


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
    rollouts: Annotated[int | None, typer.Option(min=1, help="how many to check; default: all")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="largest |difference of log-prob|; default: 1e-4 for 32 bits, likelihoods for 16"),
    ] = None,
    one_in: Annotated[
        int, typer.Option(min=1, metavar="N", help="the contamination, one rollout in N, that it must be able to find")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="audit while the run goes on, until it ends")] = False,
    idle: Annotated[
        float, typer.Option(min=0, metavar="S", help="with --follow: end after S s without a rollout")
    ] = 600,
    deadline: Annotated[
        float, typer.Option(min=0, metavar="S", help="with --follow: end S s after the run, checked or not")
    ] = 600,
    plan: Annotated[
        bool, typer.Option("--plan", help="only print how many rollouts must be checked, and stop")
    ] = False,
    probability: Annotated[
        float, typer.Option(metavar="P", help="with --plan: the probability to find a fault")
    ] = 0.99,
    as_json: AsJson = False,
) -> None:
    """Recompute rollouts' log-probs under the versions that they claim, and name each violation.

    Exit code 1 unless the verdict is clean."""
    if not run_dir.is_dir():
        fail(f"no run directory {run_dir}", code=2)
    add_gateway_turns(run_dir)
    if plan:
        from slime_backend.cli.rollouts import print_plan

        if not 0 < probability < 1:
            fail(f"--probability {probability:g} must lie between 0 and 1; certainty means checking all", code=2)
        print_plan(run_dir, probability, as_json)
        return
    from slime_backend.cli.audit_run import audit_command

    if not audit_command(
        run_dir,
        rollouts=rollouts,
        tolerance=tolerance,
        one_in=one_in,
        follow_until=(idle, deadline) if follow else None,
        as_json=as_json,
    ):
        raise typer.Exit(1)


def add_gateway_turns(run_dir: Path) -> None:
    """Append to the ledger what the gateway of this run directory stored since the last export; it may be running."""
    if not RunDir(run_dir).gateway_store.is_file():
        return
    try:
        module = importlib.import_module("slime_backend.cli.gateway")
    except ModuleNotFoundError as error:
        typer.echo(f"turns since the last export are not audited: {error.name} is not installed", err=True)
        return
    typer.echo(module.export(run_dir, None), err=True)
