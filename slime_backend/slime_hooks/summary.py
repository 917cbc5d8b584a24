"""The last lines of a slime job: what was published and verified, where it lies, and the commands that look at it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_backend.command_line import command, python_module
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.slime_hooks.log_prefix import PREFIX


def print_summary(args: Any, wandb_dir: Path | None, *, failed: str = "") -> None:
    """Print the summary of a job that is over; `failed` is why it ended early, if it did. Raises nothing."""
    try:
        lines = list(summary(args, wandb_dir, failed))
    except Exception as error:  # a view of the job, whose own outcome must come through
        lines = [f"no summary: {type(error).__name__}: {error}"]
    print("\n".join(PREFIX + line for line in lines), flush=True)


def summary(args: Any, wandb_dir: Path | None, failed: str = "") -> Iterator[str]:
    """Yield the lines, without the prefix."""
    directory = Path(args.reef_run_dir)
    yield f"the job ended early: {failed}" if failed else "the job is complete"
    yield published(_rows(RunDir(directory).publications))
    yield f"run directory {shlex.quote(str(directory))}"
    if not directory.is_dir():
        yield "nothing to audit: the job ended before its first publication"
    elif getattr(args, "reef_save_weights", False):
        yield f"audit it: {command('audit', directory)}"
    else:
        yield f"no audit of its log-probs, which needs --reef-save-weights; look at it: {command('report', directory)}"
    if wandb_dir is not None:
        yield f"W&B in {shlex.quote(str(wandb_dir))}"
        if wandb_dir.name.startswith("offline-"):
            yield f"upload it: {python_module('wandb', 'sync', wandb_dir)}"


def published(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return how many publications there were, and on how many each resumed engine's evidence was verified."""
    if not reports:
        return "0 publications"
    good = sum(verified(report) for report in reports)
    line = f"{len(reports)} publications, {good} verified on every engine"
    if good < len(reports):
        others = [str(report["version"]) for report in reports if not verified(report)]
        line += f"; not so: version {', '.join(others)} (publications.jsonl names engine and step)"
    return line


def verified(report: Mapping[str, Any]) -> bool:
    """Whether each engine was confirmed at the new version, which none is without its own evidence."""
    engines = report["engines"]
    return report["state"] == "resumed" and bool(engines) and all(engine["confirmed"] for engine in engines)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    return list(read_jsonl(path)) if path.is_file() else []
