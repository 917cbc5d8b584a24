"""The `reef/` metrics of one rollout step, and its line in steps.jsonl. Duck-typed: no slime.

| metric | unit | meaning |
| --- | --- | --- |
| version_lag_mean, version_lag_max | versions | per token of what is trained on |
| class_pure, class_recomputed, class_mixed, class_carried | requests | docs/provenance.md |
| mixed_share, retracted_share | 0..1 | of the requests |
| prefix_hit_rate | 0..1 | of later admissions inside a version |
| stale_<decision> | samples, tokens | what the staleness policy decided, by reason |
| audit_contradictions | requests | whose record contradicts itself: must be 0 |
| samples_without_spans | samples | of a rollout function that keeps SGLang's meta_info to itself |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_backend.audit.audit import why_inconsistent
from slime_backend.provenance.classes import count_classes
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.staleness import BatchLag, Decision, count
from slime_backend.slime_hooks.rollouts.generate_calls import calls_of, record_of
from slime_backend.slime_hooks.rollouts.ledger import group_name, has_calls, reward_of
from slime_backend.tracking.metrics import rollout_metrics


def step_row(
    rollout_id: int, samples: Sequence[Any], decisions: Sequence[Decision], reward_key: str | None
) -> tuple[dict[str, Any], list[RolloutRecord]]:
    """The line of steps.jsonl for the samples of one training batch, and the records of their calls."""
    records = [
        record
        for sample in samples
        for call in calls_of(sample)
        if (record := record_of(sample, call, group=group_name(sample), engine="", temperature=1.0, reward=0.0))
    ]
    lag = BatchLag.of(d.lag for d in decisions if d.action != "drop")
    kept = [sample for sample in samples if not sample.remove_sample]
    rewards = [reward_of(sample, reward_key) for sample in kept]
    row = {
        "step": rollout_id + 1,
        "reward_mean": sum(rewards) / max(1, len(rewards)),
        "lag_mean": lag.mean,
        "lag_max": lag.max,
        "lag_tokens": lag.by_lag,
        "staleness": count(decisions),
        "mixed_share": sum(r.mixed for r in records) / max(1, len(records)),
        "retracted_share": sum(r.retractions > 0 for r in records) / max(1, len(records)),
        "classes": count_classes(r.rollout_class for r in records),
        "receipts": [call.receipt for sample in kept for call in calls_of(sample)],
    }
    return row, records


def figures(row: dict[str, Any], records: Sequence[RolloutRecord], samples: Sequence[Any]) -> dict[str, float | int]:
    """The metrics above, by their full names."""
    found: dict[str, float | int | None] = {
        **rollout_metrics(row, records, resubmitted=0),
        "audit_contradictions": sum(bool(why_inconsistent(r)) for r in records),
        "samples_without_spans": sum(not has_calls(sample) for sample in samples),
    }
    del found["resubmitted"]  # the local trainer's: slime sends nothing twice
    return {f"reef/{name}": value for name, value in found.items() if value is not None}
