"""The verdicts on what schedulers report: why a pause, a flush or a sweep is not proven, rank by rank.

Pure functions of the reports before and after a step; an empty list means proven. Anything that isn't positively shown
counts as a reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_backend.policy import Policy
from slime_backend.wire import SchedulerReport


def why_not_paused(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport], policy: Policy) -> list[str]:
    """Every reason why the reports don't prove that each rank took this pause, and is still in it."""
    reasons = why_not_same(before, after)
    for rank, (old, new) in enumerate(zip(before, after, strict=False)):
        if not new.kv.paused or new.kv.pauses <= old.kv.pauses:
            reasons.append(f"rank {rank} isn't paused")
        elif new.kv.pauses > old.kv.pauses + 1:
            reasons.append(
                f"rank {rank} was paused {new.kv.pauses - old.kv.pauses} times: another publisher is at work"
            )
        elif new.kv.pause_mode != policy.pause_mode:
            reasons.append(f"rank {rank} is paused in mode {new.kv.pause_mode}, not {policy.pause_mode}")
    return reasons


def why_not_flushed(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport], policy: Policy) -> list[str]:
    """Every reason why the reports don't prove that each rank is paused, flushed since `before`, and empty."""
    reasons = why_not_paused(before, after, policy)
    for rank, (old, new) in enumerate(zip(before, after, strict=False)):
        if new.kv.flush_epoch <= old.kv.flush_epoch:
            reasons.append(f"rank {rank} hasn't flushed (refused {new.kv.flush_refused}, last {new.kv.last_refusal})")
        if not new.kv.is_empty:
            reasons.append(f"rank {rank} isn't empty: {', '.join(new.kv.leftovers())}")
    return reasons


def why_not_swept(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport], policy: Policy) -> list[str]:
    """Every reason why the reports, the later ones of a loaded and still paused engine, don't prove that each rank
    scopes its cache entries, has begun a new epoch since `before`, and keeps nothing unlocked of an older one.

    Nothing is admitted during the pause, so whatever is unlocked then is of an older epoch.
    """
    reasons = why_not_paused(before, after, policy)
    for rank, (old, new) in enumerate(zip(before, after, strict=False)):
        reasons += [f"rank {rank}'s hook {hook}: {why}" for hook, why in new.missing_hooks(policy.needed_hooks).items()]
        if new.epoch <= old.epoch:
            reasons.append(f"rank {rank} reports no weight change (epoch {new.epoch})")
        if new.kv.swept_epoch != new.epoch:
            reasons.append(f"rank {rank} is in epoch {new.epoch} and last swept for epoch {new.kv.swept_epoch}")
        left = {n: getattr(new.kv, n) for n in ("tree_full_evictable", "tree_swa_evictable") if getattr(new.kv, n)}
        if left:
            reasons.append(f"rank {rank} kept entries: {', '.join(f'{n}={v}' for n, v in left.items())}")
    return reasons


def why_not_running(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> list[str]:
    """Every reason why the reports don't prove that the same ranks as `before`, if that is known, generate again."""
    reasons = why_not_same(before, after) if before else []
    return reasons + [f"rank {rank} is still paused" for rank, new in enumerate(after) if new.kv.paused]


def why_not_same(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> list[str]:
    if len(before) != len(after):
        return [f"{len(after)} ranks report, {len(before)} did before"]
    restarted = [str(i) for i, (o, n) in enumerate(zip(before, after, strict=True)) if o.instance_id != n.instance_id]
    return [f"rank {', '.join(restarted)} restarted in between"] if restarted else []
