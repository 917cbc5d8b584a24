"""The names of the metrics that a run logs, from the code that logs them."""

from __future__ import annotations

from dataclasses import fields

from slime_backend.policy import decide
from slime_backend.provenance.classes import count_classes
from slime_backend.provenance.staleness import count
from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.tracking.columns import StepMetrics
from slime_backend.tracking.metrics import publication_metrics, rollout_metrics
from slime_backend.tracking.tracker import STEP_METRICS


def logged() -> set[str]:
    """Every name, as family/name."""
    row = {
        "lag_mean": 0.0,
        "lag_max": 0,
        "mixed_share": 0.0,
        "retracted_share": 0.0,
        "classes": count_classes([]),
        # As loop._record_step puts them together.
        "staleness": {**count([]), "tokens_masked_ratio_low": 0, "tokens_masked_ratio_high": 0},
    }
    families = {
        "train": [f.name for f in fields(StepMetrics)],
        "rollout": rollout_metrics(row, [], 0),
        "publication": publication_metrics(
            PublicationReport("v1", "v0", decide("disjoint", "retract"), "disk", engines=[EngineOutcome("e")])
        ),
    }
    assert set(families) == set(STEP_METRICS)
    return {f"{family}/{name}" for family, names in families.items() for name in names}
