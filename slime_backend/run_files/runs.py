"""Run directories: where a new run goes, and what a resumed one goes on from."""

from __future__ import annotations

import shutil
from pathlib import Path

from slime_backend.run_files import RunDir


def is_used(run_dir: Path) -> bool:
    """The local trainer writes the first of these before its first request, slime's hooks only the second."""
    return RunDir(run_dir).submitted.exists() or RunDir(run_dir).rollouts.exists()


def new_run_dir(wanted: Path) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... where runs are already: nothing recorded is ever written over."""
    number, candidate = 1, wanted
    while is_used(candidate):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def remove_unbegun(run_dir: Path) -> None:
    """Remove a run's directory that holds nothing but its locks: its start was refused. For who holds its lock."""
    run = RunDir(run_dir)
    locks = {run.run_lock, run.run_lock_holder, run.ledger_lock, run.ledger_lock_holder}
    if set(run_dir.rglob("*")) <= {run.ledger, *locks}:
        shutil.rmtree(run_dir)
