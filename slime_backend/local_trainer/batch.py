"""`collect_batch` collects the batch of one training step: complete groups that the staleness policy accepts.

    worker -> groups -> decide -> too stale: recorded, their slots freed, others waited for
                               -> the rest: a Batch of records, each with its decision

Waiting ends: the trainer does no step while it waits, so rollouts that start now have lag 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from slime_backend.local_trainer.checkpoint import version_step
from slime_backend.local_trainer.grpo import Sample
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.staleness import BatchLag, Decision, StalenessPolicy, decide, rollout_lag


class GroupSource(Protocol):
    """A batch is collected from one of these: `RolloutWorker`, or a list in a test."""

    async def next_groups(self, count: int) -> list[list[RolloutRecord]]: ...

    def release(self, groups: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """This pairs a rollout with the staleness policy's decision on it."""

    record: RolloutRecord
    decision: Decision

    def sample(self) -> Sample:
        masked = self.decision.action == "mask"
        corrected = self.decision.action == "correct"
        r = self.record
        return Sample(
            r.prompt_ids,
            r.output_ids,
            r.logprobs,
            r.reward,
            group=r.group,
            versions=r.versions,
            loss_mask=[1 - beyond for beyond in self.decision.beyond] if masked else None,
            stale=self.decision.beyond if corrected else None,
            temperature=r.temperature,
            fresh=self.fresh(),
        )

    def fresh(self) -> list[int]:
        """Return 1 for each output token that the current weights sampled from KV that they computed alone, else 0.

        A token of lag 0 over KV of an older version was sampled by no single model.
        """
        own = [0] * len(self.record.output_ids)
        for segment in self.record.segments:
            if all(span.version == segment.version for span in segment.context):
                own[segment.start : segment.end] = [1] * (segment.end - segment.start)
        return [int(one and lag == 0) for one, lag in zip(own, self.decision.lag.per_token(), strict=True)]


@dataclass(slots=True)
class Batch:
    """A batch holds the rollouts that a step trains on, and those that were dropped while it was collected."""

    groups: list[list[Judged]] = field(default_factory=list)
    dropped: list[Judged] = field(default_factory=list)

    @property
    def kept(self) -> list[Judged]:
        return [judged for group in self.groups for judged in group]

    @property
    def records(self) -> list[RolloutRecord]:
        return [judged.record for judged in self.kept]

    @property
    def decisions(self) -> list[Decision]:
        """Return the decision on every rollout, kept or dropped."""
        return [judged.decision for judged in (*self.kept, *self.dropped)]

    @property
    def lag(self) -> BatchLag:
        """Return the lag of the tokens that are trained on."""
        return BatchLag.of(judged.decision.lag for judged in self.kept)

    def samples(self) -> list[list[Sample]]:
        return [[judged.sample() for judged in group] for group in self.groups]


async def collect_batch(
    source: GroupSource,
    groups: int,
    *,
    trainer_version: int,
    policy: StalenessPolicy,
    bound: int | None,
    log: Callable[[str], None] = lambda text: None,
) -> Batch:
    """Collect `groups` groups to train on, oldest first. Raises what a rollout raised, and StalenessError."""
    batch = Batch()
    while len(batch.groups) < groups:
        found = await source.next_groups(groups - len(batch.groups))
        lags = [[rollout_lag(r.receipt, r.spans, trainer_version, version_step) for r in group] for group in found]
        emptied = 0
        for group, decisions in zip(found, decide(lags, policy, bound), strict=True):
            judged = [Judged(record, decision) for record, decision in zip(group, decisions, strict=True)]
            kept = [j for j in judged if j.decision.action != "drop"]
            batch.dropped += [j for j in judged if j.decision.action == "drop"]
            if kept:
                batch.groups.append(kept)
            else:
                emptied += 1
        if emptied:
            source.release(emptied)  # at once, so that new ones start with the current weights
            log(f"staleness: {emptied} of {len(found)} groups are over max_version_lag={bound}; waiting for others")
    return batch
