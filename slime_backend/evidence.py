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
        reasons += _kept_entries(rank, new)
    return reasons


def why_not_loaded(at_pause: Sequence[SchedulerReport], after: Sequence[SchedulerReport], policy: Policy) -> list[str]:
    """Every reason why the reports, of a loaded and still paused engine, don't prove that no rank computed anything
    since `at_pause`, the reports that proved its pause, and that nothing of the old weights was left to compute with.

    The flag of a pause proves nothing: a loop of SGLang that never reads it goes on generating (pipeline parallelism).
    A batch that was launched before the pause may still be on the device, so the device must have been waited for
    before the first byte changed; the batch's result may stay queued until the resume.
    """
    reasons = why_not_same(at_pause, after)
    for rank, (then, now) in enumerate(zip(at_pause, after, strict=False)):
        if now.kv.forward_passes != then.kv.forward_passes:
            reasons.append(
                f"rank {rank} launched {now.kv.forward_passes - then.kv.forward_passes} forward passes while paused "
                f"({then.kv.forward_passes} at the pause, {now.kv.forward_passes} after the load)"
            )
        epochs, waits = now.epoch - then.epoch, now.kv.device_waits - then.kv.device_waits
        failed = now.kv.device_waits_failed - then.kv.device_waits_failed
        if waits < epochs or failed:
            reasons.append(
                f"rank {rank} began {epochs} epochs and waited for its device before {waits} of them ({failed} failed)"
            )
        if now.kv.image_features:
            reasons.append(f"rank {rank} kept image features of older weights: image_features={now.kv.image_features}")
        if not policy.radix_cache:
            reasons += _kept_entries(rank, now)
    return reasons


def _kept_entries(rank: int, report: SchedulerReport) -> list[str]:
    """The counts of unlocked cache entries that aren't 0."""
    names = ("tree_full_evictable", "tree_swa_evictable", "tree_mamba_evictable")
    left = [f"{name}={getattr(report.kv, name)}" for name in names if getattr(report.kv, name)]
    return [f"rank {rank} kept entries: {', '.join(left)}"] if left else []


def why_not_running(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> list[str]:
    """Every reason why the reports don't prove that the same ranks as `before`, if that is known, generate again."""
    reasons = why_not_same(before, after) if before else []
    return reasons + [f"rank {rank} is still paused" for rank, new in enumerate(after) if new.kv.paused]


def why_not_same(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> list[str]:
    if len(before) != len(after):
        return [f"{len(after)} ranks report, {len(before)} did before"]
    restarted = [str(i) for i, (o, n) in enumerate(zip(before, after, strict=True)) if o.instance_id != n.instance_id]
    return [f"rank {', '.join(restarted)} restarted in between"] if restarted else []
