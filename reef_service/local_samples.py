"""A gateway's batch as the local trainer's groups: `grpo_step(model, optimizer, to_groups(batch), config)`."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

from reef_service.client import Batch
from slime_backend.local_trainer.grpo import Sample

log = logging.getLogger(__name__)


def to_groups(batch: Batch) -> list[list[Sample]]:
    """One GRPO sample for each trajectory, grouped by x-reef-group, those without one by themselves; oldest first.

    What the trajectory didn't sample (tool answers, users, other branches) is in the tokens and not in the loss, and so
    are turns whose sampling parameters change the distribution in a way that the trainer doesn't compute; these are
    logged by name. Each token has its own turn's temperature.
    """
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in batch.samples:
        group = sample.group or f"{sample.session}/{sample.trajectory}"
        groups[group].append(
            Sample(
                sample.prompt_ids,
                sample.response_ids,
                sample.logprobs,
                sample.score,
                group=group,
                versions=tuple(dict.fromkeys(str(span["version"]) for span in sample.spans)),
                loss_mask=sample.trainable_mask,
                temperature=sample.temperatures,
            )
        )
    left_out = not_trainable(batch)
    if left_out:
        named = ", ".join(f"{reason}: {tokens}" for reason, tokens in left_out.items())
        log.warning("lease %s: tokens that are not trainable and have no loss: %s", batch.lease, named)
    return list(groups.values())


def not_trainable(batch: Batch) -> dict[str, int]:
    """Count the tokens of the batch that are not trained on, by reason (greedy, or the parameters' names)."""
    found: Counter[str] = Counter()
    for sample in batch.samples:
        found.update(sample.not_trainable)
    return dict(found)
