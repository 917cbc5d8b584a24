"""Behind `reef-slime publish` and `reef-slime doctor`: running engines that somebody else started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_client.keys import EngineKeys
from slime_backend.fleet import Fleet, VersionTaken, admit
from slime_backend.fleet.doctor import Diagnosis, diagnose
from slime_backend.fleet.membership import check_named
from slime_backend.policy import Policy
from slime_backend.publication import PublicationReport, Step
from slime_backend.publication import publish as run_publication
from slime_backend.transports import CheckpointTransport


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
    keys: EngineKeys | None = None,
) -> PublicationReport:
    """Admit the engines, whatever version each is at, and publish to all of them.

    An engine that a dead publisher left paused is taken along: the publication ends with every engine resumed.
    `compare`, `finite`: as CheckpointTransport's. Raises VersionTaken, CheckpointUnfit before anything is paused.
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
        fleet = Fleet(policy, labels[0] or "unknown", allow)
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
    steps: tuple[Step, ...] = ("pause", verifying, "load", "label")
    for column in ("engine", *(f"{step} ms" for step in steps), "paused ms", "retracted", "outcome"):
        table.add_column(column, justify="left" if column in ("engine", "outcome") else "right")
    for e in report.engines:
        times = [f"{e.times[step]:.1f}" if step in e.times else "-" for step in steps]
        paused = f"{e.paused_ms:.1f}" if e.paused_ms is not None else "-"
        outcome = e.fate if e.confirmed else f"{e.fate}: {e.failed_step}: {e.reason}"
        table.add_row(e.engine, *times, paused, str(e.requests_retracted), outcome)
    Console(highlight=False).print(table)


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
