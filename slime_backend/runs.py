"""Run directories: where a new run goes, and what a resumed one goes on from."""

from __future__ import annotations

from pathlib import Path

from slime_backend.errors import ReefError


class RunError(ReefError, RuntimeError):
    """The run can't start or go on; one line."""


def is_used(run_dir: Path) -> bool:
    """The local trainer writes the first of these before its first request, slime's hooks only the second."""
    return any((run_dir / name).exists() for name in ("submitted.jsonl", "rollouts.jsonl"))


def new_run_dir(wanted: Path) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... where runs are already: nothing recorded is ever written over."""
    number, candidate = 1, wanted
    while is_used(candidate):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
