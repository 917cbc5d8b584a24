"""Which samples a trainer wants, and the condition on trajectories that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reef_service.store.schema import trajectories
from reef_service.store.turn_classes import TURN_CLASSES

Key = tuple[str, int]  # session, number of the trajectory


@dataclass(frozen=True, slots=True)
class Wish:
    """Which samples a trainer wants."""

    limit: int = 64  # samples, or groups where group_size is given
    lease_s: float = 600.0
    holder: str = ""
    id: str | None = None  # of the lease, by the trainer: asking again with it gives the same samples
    min_score: float | None = None
    max_score: float | None = None
    classes: tuple[str, ...] = TURN_CLASSES
    oldest: int = 0  # publication; nothing that was sampled before it
    group_size: int = 0  # > 0: complete groups of this many sessions, by the label that clients gave
    at_least: int = 0  # samples, or groups; nothing is given where there are fewer
    job: str = ""  # the only one that may use the lease
    step: int | None = None  # of the job; names the lease in place of `id`


def available(wish: Wish, now: float) -> list[Any]:
    """Return the conditions under which a trajectory may be given for the wish."""
    t = trajectories.c
    found = [
        t.trained_at.is_(None),
        t.scored_at.is_not(None),
        t.closed_at.is_(None),
        t.train == 1,
        t.lease.is_(None) | (t.lease_ends < now),
        t.sound == 1,
        trajectories.c["class"].in_(wish.classes),
        t.oldest >= wish.oldest,
        t.trains == 1 if wish.group_size else (t.trains == 1) | (t.named == 1),
    ]
    if wish.min_score is not None:
        found.append(t.score >= wish.min_score)
    if wish.max_score is not None:
        found.append(t.score <= wish.max_score)
    return found
