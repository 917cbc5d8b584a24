"""What a run that goes on finds of the steps before it, and what it makes good.

    step k:   row in steps.jsonl -> weights v<k> and trainer.pt on disk -> publish v<k> -> line in publications.jsonl

A run that was killed in between goes on from trainer.pt. A row of a step that trainer.pt doesn't have was never
published and is trained once more: it is moved to steps.superseded.jsonl. A version that trainer.pt has and
publications.jsonl doesn't may or may not have reached the engines, which are gone; it is noted as `unknown`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_backend.local_trainer.checkpoint import version_name
from slime_backend.provenance.jsonl import JsonlWriter, parse_line
from slime_backend.publication import PublicationReport
from slime_backend.run_files.rows import sound_rows
from slime_backend.tracking.metrics import publication_row_metrics, rollout_row_metrics, train_metrics
from slime_backend.tracking.tracker import Tracker

STEPS, SUPERSEDED, PUBLICATIONS = "steps.jsonl", "steps.superseded.jsonl", "publications.jsonl"


def make_good(run_dir: Path, step: int, policy: str, transport: str, say: Callable[[str], None]) -> None:
    """Make the files say what the checkpoint of `step` says; the lines that others were written for stay."""
    superseded = _supersede_after(run_dir, step)
    if superseded:
        numbers = ", ".join(map(str, superseded))
        say(f"step {numbers} was trained and not saved: it is trained again; its row is in {SUPERSEDED}")
    rows = {row.get("step") for row in sound_rows(run_dir / STEPS)}
    if step and step not in rows:
        say(f"step {step} has no row in {STEPS}: its weights are those of v{step}, its rollouts can't be named")
    if step and version_name(step) not in {row["version"] for row in sound_rows(run_dir / PUBLICATIONS)}:
        _note_unknown(run_dir, step, policy, transport)
        say(f"whether v{step} was published before the run ended isn't known; the engines start with it now")


def log_again(run_dir: Path, tracker: Tracker) -> None:
    """Log every step and publication that the files have, in the order of the first time: the tracker may have lost any
    of them with the process, and a row that it has is the same one at the same place."""
    published = {row["version"]: row for row in sound_rows(run_dir / PUBLICATIONS) if row["state"] == "resumed"}
    for row in sound_rows(run_dir / STEPS):
        step = row.get("step")
        if not isinstance(step, int) or "classes" not in row:  # of another program's run
            continue
        log_step(tracker, row)
        report = published.get(version_name(step))
        if report is not None:
            tracker.log("publication", step, publication_row_metrics({"wall_ms": None, **report}))


def log_step(tracker: Tracker, row: dict[str, Any]) -> None:
    """`row`: a line of steps.jsonl."""
    tracker.log("train", row["step"], train_metrics(row))
    tracker.log("rollout", row["step"], rollout_row_metrics(row))


def _supersede_after(run_dir: Path, step: int) -> list[int]:
    """Move the rows of later steps, and of a step that is there twice, out of steps.jsonl; their steps."""
    path = run_dir / STEPS
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
        elif line.endswith(b"\n"):  # a torn last line is nothing
            kept.append(line)
            seen.add(number)
    if moved:
        writer = JsonlWriter(run_dir / SUPERSEDED, durable=True)
        for row in moved:
            writer.append(row)
        writer.close()
        partial = run_dir / f".{STEPS}.partial"
        with partial.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    return [row["step"] for row in moved]


def _note_unknown(run_dir: Path, step: int, policy: str, transport: str) -> None:
    report = PublicationReport(version_name(step), version_name(step - 1), policy, transport, started_at=time.time())
    writer = JsonlWriter(run_dir / PUBLICATIONS, durable=True)
    writer.append({**report.to_json(), "state": "unknown"})
    writer.close()
