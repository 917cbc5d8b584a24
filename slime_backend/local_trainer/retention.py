"""`keep_versions`: removes checkpoints of versions that nobody needs any longer.

A version is needed while it is one of the last `keep`, or

    the engines were started from it        a process that starts again reads it
    a request in flight began under it      its rollout will name it, or a later version
    the audit beside the training is behind   no version is removed until it has caught up

The trainer's state is of the last version, so a resumed run has what it needs. An audit at the end finds the last
versions only, and counts the rollouts of the others (`gone`): with `keep_versions` audit beside the training. The local
trainer's weights are under nobody's lease: a gateway's leases are on samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from slime_backend.audit.follow import load


def removable(present: Iterable[str], step: int, keep: int, needed: Iterable[str]) -> list[str]:
    """Versions of `present` that may go once v<step> is published: not among the last `keep`, not one of `needed`, and
    not after the oldest of them, since a rollout that began under it may name any later version. Oldest first."""
    numbers = {int(n.removeprefix("v")): n for n in present if n.startswith("v") and n.removeprefix("v").isdecimal()}
    needed_numbers = [int(n.removeprefix("v")) for n in needed]
    oldest = min([step - keep + 1, *needed_numbers])
    return [numbers[number] for number in sorted(numbers) if number < oldest]


def prune(weights: Path, step: int, keep: int, in_flight: Iterable[str], started_from: str) -> list[str]:
    """Remove what may go; its names."""
    gone = [v for v in removable((p.name for p in weights.glob("v*")), step, keep, in_flight) if v != started_from]
    for version in gone:
        # The config first: without it the directory is no version for a reader, also after a kill half-way.
        (weights / version / "config.json").unlink(missing_ok=True)
        shutil.rmtree(weights / version)
    return gone


def audit_is_behind(run_dir: Path) -> bool:
    """Whether the audit beside the training still has rollouts to check; taken for behind until it reports."""
    found = load(run_dir)
    return found is None or found.waiting > 0
