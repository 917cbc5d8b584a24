"""This module brings the files of a resumed run into line with its last checkpoint.

    step k:   row in steps.jsonl -> weights v<k> and trainer.pt on disk -> publish v<k> -> line in publications.jsonl

A run that was killed in between goes on from trainer.pt. A row of a step that trainer.pt doesn't have was never
published and is trained once more: it is moved to steps.superseded.jsonl. A version that trainer.pt has and
publications.jsonl doesn't may or may not have reached the engines, which are gone; it is noted as `unknown`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_backend.local_trainer.checkpoint import version_name
from slime_backend.policy import Policy
from slime_backend.publication import PublicationReport
from slime_backend.run_files import RunDir, replace_file
from slime_backend.run_files.jsonl import JsonlWriter, parse_line
from slime_backend.run_files.rows import sound_rows
from slime_backend.tracking.metrics import publication_row_metrics, rollout_row_metrics, train_metrics
from slime_backend.tracking.tracker import Tracker


def reconcile(run_dir: Path, step: int, policy: Policy, transport: str, log: Callable[[str], None]) -> None:
    """Make the files agree with the checkpoint of `step`; lines of earlier steps stay."""
    run = RunDir(run_dir)
    superseded = _supersede_after(run, step)
    if superseded:
        numbers = ", ".join(map(str, superseded))
        log(f"step {numbers} was trained and not saved: it is trained again; its row is in {run.superseded_steps.name}")
    rows = {row.get("step") for row in sound_rows(run.steps)}
    if step and step not in rows:
        log(
            f"step {step} has no row in {run.steps.name}: its weights are those of v{step}, its rollouts can't be named"
        )
    if step and version_name(step) not in {row["version"] for row in sound_rows(run.publications)}:
        _note_unknown(run, step, policy, transport)
        log(f"whether v{step} was published before the run ended isn't known; the engines start with it now")


def log_again(run_dir: Path, tracker: Tracker) -> None:
    """Log every step and publication that the files have, in their first order.

    The tracker may have lost any of them with the process; a row that it has already is the same one at the same place.
    """
    run = RunDir(run_dir)
    published = {row["version"]: row for row in sound_rows(run.publications) if row["state"] == "resumed"}
    for row in sound_rows(run.steps):
        step = row.get("step")
        if not isinstance(step, int) or "classes" not in row:  # another program's row
            continue
        log_step(tracker, row)
        report = published.get(version_name(step))
        if report is not None:
            tracker.log("publication", step, publication_row_metrics({"wall_ms": None, **report}))


def log_step(tracker: Tracker, row: dict[str, Any]) -> None:
    """Log a row of steps.jsonl."""
    tracker.log("train", row["step"], train_metrics(row))
    tracker.log("rollout", row["step"], rollout_row_metrics(row))


def _supersede_after(run: RunDir, step: int) -> list[int]:
    """Move the rows of later steps, and of a step that is there twice, out of steps.jsonl; return their steps."""
    path = run.steps
    if not path.is_file():
        return []
    kept: list[bytes] = []
    moved: list[dict[str, Any]] = []
    seen: set[Any] = set()
    for line in path.read_bytes().splitlines(keepends=True):
        record, _ = parse_line(line)
        number = (record or {}).get("step")
        if record is not None and isinstance(number, int) and (number > step or number in seen):
            moved.append(record)
        elif line.endswith(b"\n"):  # an incomplete last line is dropped
            kept.append(line)
            seen.add(number)
    if moved:
        writer = JsonlWriter(run.superseded_steps, durable=True)
        for row in moved:
            writer.append(row)
        writer.close()
        replace_file(path, b"".join(kept), durable=True)
    return [row["step"] for row in moved]


def _note_unknown(run: RunDir, step: int, policy: Policy, transport: str) -> None:
    report = PublicationReport(version_name(step), version_name(step - 1), policy, transport, started_at=time.time())
    writer = JsonlWriter(run.publications, durable=True)
    writer.append({**report.to_json(), "state": "unknown"})
    writer.close()
