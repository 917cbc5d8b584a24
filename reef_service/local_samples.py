"""A gateway's batch as the local trainer's groups: `grpo_step(model, optimizer, to_groups(batch), config)`."""

from __future__ import annotations

from collections import defaultdict

from reef_service.client import Batch
from slime_backend.local_trainer.grpo import Sample


def to_groups(batch: Batch) -> list[list[Sample]]:
    """One GRPO sample for each trajectory, grouped by x-reef-group, those without one by themselves; oldest first.

    What the trajectory didn't sample (tool answers, users, other branches) is in the tokens and not in the loss.
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
                loss_mask=sample.loss_mask,
            )
        )
    return list(groups.values())
