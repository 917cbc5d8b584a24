"""`reef-slime publish` and `reef-slime doctor` work on engines that are already running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slime_backend import event_loop
from slime_backend.cli.options import (
    AdminKeyEnv,
    Allow,
    ApiKeyEnv,
    AsJson,
    DeadlineS,
    Engines,
    Layout,
    Sharing,
    VerifyWeightsOption,
    holders,
    read_keys_of,
    weights_mode,
)
from slime_backend.config import ConfigError
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_client.keys import EngineKeys
from slime_backend.fleet import Fleet, VersionTaken, admit
from slime_backend.fleet.doctor import Diagnosis, diagnose
from slime_backend.fleet.membership import check_named
from slime_backend.fleet.weights import VerifyWeights, WeightRecords
from slime_backend.policy import Policy, decide
from slime_backend.publication import PublicationError, PublicationReport, Step
from slime_backend.publication import publish as run_publication
from slime_backend.transports import CheckpointTransport


def publish(
    checkpoint: Annotated[Path, typer.Option(help="a Hugging Face checkpoint that the engines can read")],
    version: Annotated[str, typer.Option(help="the name of the new weights")],
    engine: Engines,
    sharing: Sharing = "retract",
    layout: Layout = "disjoint",
    allow: Allow = None,
    deadline_pause_s: DeadlineS = 15.0,
    deadline_flush_s: DeadlineS = 30.0,
    deadline_load_s: DeadlineS = 600.0,
    deadline_control_s: DeadlineS = 10.0,
    compare: Annotated[
        bool, typer.Option(help="with the names, shapes and dtypes of the model that the engines were started with")
    ] = True,
    finite: Annotated[bool, typer.Option("--check-finite/--no-check-finite", help="read all of it for NaN")] = True,
    verify_weights: VerifyWeightsOption = "auto",
    api_key_env: ApiKeyEnv = "",
    admin_api_key_env: AdminKeyEnv = "",
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint, verified, to running engines. Exit code 1 if any isn't confirmed at the new version."""
    policy = decide(layout, sharing)  # type: ignore[arg-type]
    deadlines = Deadlines(deadline_pause_s, deadline_flush_s, deadline_load_s, deadline_control_s)
    publication = publish_checkpoint(
        policy,
        engine,
        checkpoint,
        version,
        holders(allow),
        deadlines,
        compare=compare,
        finite=finite,
        verify_weights=weights_mode(verify_weights),
        keys=read_keys_of(api_key_env, admin_api_key_env),
    )
    try:
        report = event_loop.run_until_signal(publication)
    except PublicationError as error:
        show_publication(error.report, as_json)
        raise
    show_publication(report, as_json)
    if report.unconfirmed:
        raise typer.Exit(1)


def show_publication(report: PublicationReport, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        print_report(report)


def doctor(
    engine: Annotated[list[str] | None, typer.Option("--engine", metavar="URL", help="a running server")] = None,
    installation: Annotated[
        bool, typer.Option("--installation", help="look at this Python instead: entry points, SGLang, slime, wandb")
    ] = False,
    sharing: Sharing = "retract",
    layout: Layout = "disjoint",
    allow: Allow = None,
    api_key_env: ApiKeyEnv = "",
    admin_api_key_env: AdminKeyEnv = "",
    as_json: AsJson = False,
) -> None:
    """Try pause, flush, scope and label on running SGLang servers; exit code 1 if the policy isn't safe on one. With
    --installation look at this Python instead; exit code 1 if something is wrong with it."""
    if installation:
        from slime_backend.cli.installation import examine as look
        from slime_backend.cli.installation import show

        if not show(look(), as_json):
            raise typer.Exit(1)
        return
    if not engine:
        raise ConfigError("doctor looks at running engines (--engine URL, repeat for more) or at --installation")
    policy = decide(layout, sharing)  # type: ignore[arg-type]
    diagnoses = event_loop.run_until_signal(
        examine(engine, holders(allow), read_keys_of(api_key_env, admin_api_key_env))
    )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "policy": str(policy),
                    "engines": [
                        {
                            "engine": d.engine,
                            "unsafe": d.unsafe_for(policy),
                            "findings": [asdict(f) for f in d.findings],
                        }
                        for d in diagnoses
                    ],
                }
            )
        )
    else:
        for diagnosis in diagnoses:
            print_diagnosis(diagnosis, policy)
    if any(d.unsafe_for(policy) for d in diagnoses):
        raise typer.Exit(1)


async def publish_checkpoint(
    policy: Policy,
    urls: Sequence[str],
    checkpoint: Path,
    version: str,
    allow: frozenset[str],
    deadlines: Deadlines | None = None,
    *,
    compare: bool = True,
    finite: bool = True,
    verify_weights: VerifyWeights = "auto",
    keys: EngineKeys | None = None,
) -> PublicationReport:
    """Admit the engines, whatever version each is at, and publish to all of them.

    An engine that a dead publisher left paused takes part: the publication ends with every engine resumed.
    `compare`, `finite`: see CheckpointTransport. Raises VersionTaken, CheckpointUnfit before anything is paused.
    """
    check_named(version)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(EngineClient(url, keys=keys, deadlines=deadlines))
            for url in dict.fromkeys(urls)
        ]
        labels = await asyncio.gather(*(client.weight_version() for client in clients))
        for client, label in zip(clients, labels, strict=True):
            if label == version:
                raise VersionTaken(
                    f"version {version!r} is taken: {client.name} serves weights of that name; give --version a name "
                    "that wasn't used"
                )
        fleet = Fleet(policy, labels[0] or "unknown", allow, weights=WeightRecords(verify_weights))
        for client in clients:
            await admit(fleet, client)
        transport = CheckpointTransport(checkpoint, compare=compare, finite=finite)
        return await run_publication(fleet, transport, version)


async def examine(urls: Sequence[str], allow: frozenset[str], keys: EngineKeys | None = None) -> list[Diagnosis]:
    """Diagnose all engines at once."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(url, keys=keys)) for url in dict.fromkeys(urls)]
        return list(await asyncio.gather(*(diagnose(client, allow) for client in clients)))


def print_report(report: PublicationReport) -> None:
    table = Table(title=f"{report.previous_version} -> {report.version}: {report.state}", title_justify="left")
    # A publication either flushes or only verifies its pause: the other column would be empty.
    verifying: Step = "verify" if any("verify" in e.times for e in report.engines) else "flush"
    steps: tuple[Step, ...] = ("pause", verifying, "load", "weights", "label")
    for column in ("engine", *(f"{step} ms" for step in steps), "paused ms", "retracted", "tensors", "outcome"):
        table.add_column(column, justify="left" if column in ("engine", "outcome") else "right")
    for e in report.engines:
        times = [f"{e.times[step]:.1f}" if step in e.times else "-" for step in steps]
        paused = f"{e.paused_ms:.1f}" if e.paused_ms is not None else "-"
        outcome = e.fate if e.confirmed else f"{e.fate}: {e.failed_step}: {e.reason}"
        tensors = f"{e.tensors_verified} of {e.tensors_looked_at}" if e.tensors_looked_at else "-"
        table.add_row(e.engine, *times, paused, str(e.requests_retracted), tensors, outcome)
    console = Console(highlight=False)
    console.print(table)
    for e in report.engines:
        if e.weights_not_verified:
            console.print(f"{e.engine}: weights not verified: {e.weights_not_verified}", markup=False)


def print_diagnosis(diagnosis: Diagnosis, policy: Policy) -> None:
    table = Table(title=diagnosis.engine, title_justify="left")
    for column in ("check", "verdict", "seen", "what it means for training"):
        table.add_column(column)
    for finding in diagnosis.findings:
        table.add_row(finding.check, finding.verdict, finding.seen, finding.meaning)
    console = Console(highlight=False)
    console.print(table)
    unsafe = diagnosis.unsafe_for(policy)
    console.print(f"{policy}: {'safe' if not unsafe else 'NOT SAFE here'}", markup=False)
    for reason in unsafe:
        console.print(f"  - {reason}", markup=False)
