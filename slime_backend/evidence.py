"""The verdicts on what schedulers report: why a pause, a flush or a sweep is not proven, rank by rank.

Pure functions of the reports before and after a step; an empty list means proven. Anything that isn't positively shown
counts as a reason. "Rank" is every process that computes with the model: each data-parallel rank and each tensor rank
behind it, since SGLang's own answers are those of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_backend.policy import Policy
from slime_backend.wire import SchedulerReport

Reports = Sequence[SchedulerReport]


def named_ranks(reports: Reports) -> Iterator[tuple[str, SchedulerReport]]:
    """Every rank that reports, with its name in a reason."""
    for number, report in enumerate(reports):
        for rank in report.ranks:
            yield _name(number, report, rank), rank


def _name(number: int, report: SchedulerReport, rank: SchedulerReport) -> str:
    return f"rank {number}" + (f", tensor rank {rank.tensor_rank}" if report.tensor_size > 1 else "")


def _pairs(before: Reports, after: Reports) -> Iterator[tuple[str, SchedulerReport, SchedulerReport]]:
    """(name, then, now) of every rank. `why_not_same` says where the two lists differ."""
    for (name, old), (_, new) in zip(named_ranks(before), named_ranks(after), strict=False):
        yield name, old, new


def why_not_paused(before: Reports, after: Reports, policy: Policy) -> list[str]:
    """Every reason why the reports don't prove that each rank took this pause, and is still in it."""
    reasons = why_not_same(before, after)
    for name, old, new in _pairs(before, after):
        if not new.kv.paused or new.kv.pauses <= old.kv.pauses:
            reasons.append(f"{name} isn't paused")
        elif new.kv.pauses > old.kv.pauses + 1:
            reasons.append(f"{name} was paused {new.kv.pauses - old.kv.pauses} times: another publisher is at work")
        elif new.kv.pause_mode != policy.pause_mode:
            reasons.append(f"{name} is paused in mode {new.kv.pause_mode}, not {policy.pause_mode}")
    return reasons


def why_not_flushed(before: Reports, after: Reports, policy: Policy) -> list[str]:
    """Every reason why the reports don't prove that each rank is paused, flushed since `before`, and empty."""
    reasons = why_not_paused(before, after, policy)
    for name, old, new in _pairs(before, after):
        if new.kv.flush_epoch <= old.kv.flush_epoch:
            reasons.append(f"{name} hasn't flushed (refused {new.kv.flush_refused}, last {new.kv.last_refusal})")
        if not new.kv.is_empty:
            reasons.append(f"{name} isn't empty: {', '.join(new.kv.leftovers())}")
    return reasons


def why_not_swept(before: Reports, after: Reports, policy: Policy) -> list[str]:
    """Every reason why the reports, the later ones of a loaded and still paused engine, don't prove that each rank
    scopes its cache entries, has begun a new epoch since `before`, and keeps nothing unlocked of an older one.

    Nothing is admitted during the pause, so whatever is unlocked then is of an older epoch.
    """
    reasons = why_not_paused(before, after, policy)
    for name, old, new in _pairs(before, after):
        reasons += [f"{name}'s hook {hook}: {why}" for hook, why in new.missing_hooks(policy.needed_hooks).items()]
        if new.epoch <= old.epoch:
            reasons.append(f"{name} reports no weight change (epoch {new.epoch})")
        if new.kv.swept_epoch != new.epoch:
            reasons.append(f"{name} is in epoch {new.epoch} and last swept for epoch {new.kv.swept_epoch}")
        reasons += _kept_entries(name, new)
    return reasons


def why_not_updated(at_pause: Reports, after: Reports, *, counted: bool = True) -> list[str]:
    """Every reason why the reports, the later ones of an engine that answered a load with success, don't prove that
    each rank carried out every update since `at_pause`, and that all tensor ranks are in the same epoch. `counted`:
    there must have been an update at all.

    A failed update is no reason where the rank that answers counted it too, since the sender heard and sent again, and
    where the last one was carried out.
    """
    reasons = why_not_same(at_pause, after)
    for number, (before, report) in enumerate(zip(at_pause, after, strict=False)):
        answered = report.loads.failed - before.loads.failed
        for then, now in zip(before.ranks, report.ranks, strict=False):
            name = _name(number, report, now)
            failed = now.loads.failed - then.loads.failed
            if failed > answered or (failed and now.loads.last_failed):
                reasons.append(f"{name} failed to load: {now.loads.last_failure}")
            elif counted and now.loads.done <= then.loads.done:
                reasons.append(f"{name} carried out no update of its weights")
        if any(rank.epoch != report.epoch for rank in report.tensor_ranks):
            epochs = ", ".join(str(rank.epoch) for rank in report.ranks)
            reasons.append(f"rank {number}'s tensor ranks are in different epochs ({epochs})")
    return reasons


def why_not_loaded(at_pause: Reports, after: Reports, policy: Policy) -> list[str]:
    """Every reason why the reports, of a loaded and still paused engine, don't prove that no rank computed anything
    since `at_pause`, the reports that proved its pause, and that nothing of the old weights was left to compute with.

    The flag of a pause proves nothing: a loop of SGLang that never reads it goes on generating (pipeline parallelism).
    A batch that was launched before the pause may still be on the device, so the device must have been waited for
    before the first byte changed; the batch's result may stay queued until the resume.
    """
    reasons = why_not_same(at_pause, after)
    for name, then, now in _pairs(at_pause, after):
        if now.kv.forward_passes != then.kv.forward_passes:
            reasons.append(
                f"{name} launched {now.kv.forward_passes - then.kv.forward_passes} forward passes while paused "
                f"({then.kv.forward_passes} at the pause, {now.kv.forward_passes} after the load)"
            )
        epochs, waits = now.epoch - then.epoch, now.kv.device_waits - then.kv.device_waits
        failed = now.kv.device_waits_failed - then.kv.device_waits_failed
        if waits < epochs or failed:
            reasons.append(
                f"{name} began {epochs} epochs and waited for its device before {waits} of them ({failed} failed)"
            )
        if now.kv.image_features:
            reasons.append(f"{name} kept image features of older weights: image_features={now.kv.image_features}")
        if not policy.radix_cache:
            reasons += _kept_entries(name, now)
    return reasons


def _kept_entries(name: str, report: SchedulerReport) -> list[str]:
    """The counts of unlocked cache entries that aren't 0."""
    counts = ("tree_full_evictable", "tree_swa_evictable", "tree_mamba_evictable")
    left = [f"{count}={getattr(report.kv, count)}" for count in counts if getattr(report.kv, count)]
    return [f"{name} kept entries: {', '.join(left)}"] if left else []


def why_not_running(before: Reports, after: Reports) -> list[str]:
    """Every reason why the reports don't prove that the same ranks as `before`, if that is known, generate again."""
    reasons = why_not_same(before, after) if before else []
    return reasons + [f"{name} is still paused" for name, new in named_ranks(after) if new.kv.paused]


def why_not_same(before: Reports, after: Reports) -> list[str]:
    """Every reason why `after` is not of the very processes of `before`, with the hooks that they ran, or lacks some of
    them."""
    if len(before) != len(after):
        return [f"{len(after)} ranks report, {len(before)} did before"]
    silent = why_ranks_missing(after)
    if silent:
        return silent
    if [report.tensor_size for report in before] != [report.tensor_size for report in after]:
        return ["the number of tensor ranks changed"]
    restarted = [name for name, old, new in _pairs(before, after) if old.instance_id != new.instance_id]
    if restarted:
        return [f"{' and '.join(restarted)} restarted in between"]
    pairs = _pairs(before, after)
    failed = [(name, new.failed_hooks.items() - old.failed_hooks.items()) for name, old, new in pairs]
    return [f"{name}'s hook {hook} {why}" for name, hooks in failed for hook, why in sorted(hooks)]


def why_ranks_missing(reports: Reports) -> list[str]:
    """Every tensor rank that left no report, and why."""
    reasons = []
    for number, report in enumerate(reports):
        reasons += [f"rank {number}, tensor rank {rank}: {why}" for rank, why in report.missing_ranks.items()]
        if not report.missing_ranks and len(report.ranks) != report.tensor_size:
            reasons.append(f"rank {number}: {len(report.ranks)} of {report.tensor_size} tensor ranks report")
    return reasons
