"""`keep_versions` removes checkpoints of versions that nothing needs any longer.

A version is needed while it is one of the last `keep`, or

    the engines were started from it     a process that starts again reads it
    a request in flight began under it   its rollout will name it, or a later version
    the audit process is behind          no version is removed until it has caught up

The trainer's state is of the last version, so a resumed run has what it needs. An audit at the end finds the last
versions only, and counts the rollouts of the others (`gone`): with `keep_versions` set `audit_beside`. The local
trainer's weights are under no lease: a gateway's leases are on samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime_backend.audit.follow import load
from slime_backend.run_files.directory import remove_weights


def removable(present: Iterable[str], step: int, keep: int, needed: Iterable[str]) -> list[str]:
    """Return the versions of `present` that may go once v<step> is published, oldest first.

    None is among the last `keep`, is one of `needed`, or comes after the oldest of these, since a rollout that began
    under it may name any later version.
    """
    numbers = {int(n.removeprefix("v")): n for n in present if n.startswith("v") and n.removeprefix("v").isdecimal()}
    needed_numbers = [int(n.removeprefix("v")) for n in needed]
    oldest = min([step - keep + 1, *needed_numbers])
    return [numbers[number] for number in sorted(numbers) if number < oldest]


def prune(weights: Path, step: int, keep: int, in_flight: Iterable[str], started_from: str) -> list[str]:
    """Remove the versions that may go; return their names."""
    gone = [v for v in removable((p.name for p in weights.glob("v*")), step, keep, in_flight) if v != started_from]
    for version in gone:
        remove_weights(weights / version)
    return gone


def audit_is_behind(run_dir: Path) -> bool:
    """Return whether the audit process has rollouts left to check; before its first report, True."""
    found = load(run_dir)
    return found is None or found.waiting > 0
