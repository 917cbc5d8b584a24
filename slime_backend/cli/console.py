"""This shows a run: bars on a terminal, plain lines elsewhere, and the summary as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slime_backend.local_trainer.loop import Reporter
from slime_backend.run_files import RunDir

PLAIN_EVERY = 50  # audited rollouts between two plain lines


@contextmanager
def console_reporter(*, quiet: bool = False) -> Iterator[Reporter]:
    """Yield a Reporter for standard output; `quiet` prints nothing."""
    if quiet:
        yield Reporter(log=lambda text: None)
    elif sys.stdout.isatty():
        console = Console(highlight=False)
        columns = (TextColumn("{task.description:<6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            tasks: dict[str, Any] = {}

            def progress(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=done)

            yield Reporter(log=lambda text: console.print(text, markup=False), progress=progress)
    else:

        def line(stage: str, done: int, total: int) -> None:
            if stage == "audit" and (done % PLAIN_EVERY == 0 or done == total):
                print(f"{stage} {done}/{total}", flush=True)

        yield Reporter(log=lambda text: print(text, flush=True), progress=line)


def print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the figures that a user looks at first."""
    audit = summary.get("audit") or {}
    rows = [
        ("policy", summary["policy"]),
        ("steps, publications", f"{summary['steps']}, {summary['publications']}"),
        ("flushes / sweeps verified", f"{summary['flushes_verified']} / {summary['sweeps_verified']}"),
        ("publications with retractions", summary["publications_with_retractions"]),
        ("rollouts submitted / completed", f"{summary['rollouts_submitted']} / {summary['rollouts_completed']}"),
        (
            "lost / doubled / aborted",
            f"{summary['rollouts_lost']} / {summary['rollouts_doubled']} / {summary['rollouts_aborted']}",
        ),
        ("reward, first three / last three steps", f"{_n(summary['reward_first3'])} / {_n(summary['reward_last3'])}"),
        ("prefix hit rate inside a version", _n(summary["prefix_hit_rate_within_version"], 4)),
        ("cached tokens, first after a publication", summary["cached_tokens_first_after_publication_max"]),
        ("pause to verified, median ms", _n(summary["pause_to_verified_ms_median"], 1)),
        ("paused, median ms", _n(summary["paused_ms_median"], 1)),
        ("version lag, mean / max", f"{_n(summary['version_lag_mean'])} / {summary['version_lag_max']}"),
        ("rollouts by class", ", ".join(f"{count} {name}" for name, count in summary["rollout_classes"].items())),
        (
            "audit",
            f"{audit['rollouts']} rollouts, {audit['tokens']} tokens, {audit['violations']} violations, "
            f"max |log-prob difference| {audit['max_abs_logprob_diff']:.2g}"
            if audit
            else "not run",
        ),
        ("verdict of the audit", f"{audit['verdict']['outcome']}: {audit['verdict']['text']}" if audit else "-"),
        ("wall time, peak memory", f"{summary['wall_s']} s, {summary['peak_rss_gib']} GiB"),
        ("metrics", summary["wandb_run_dir"] or summary["tensorboard_dir"] or "none"),
    ]
    table = Table(title=str(RunDir(run_dir).summary), show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, str(value))
    Console(highlight=False, soft_wrap=True).print(table)


def _n(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
