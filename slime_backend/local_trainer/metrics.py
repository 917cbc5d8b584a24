"""The figures of a step and of its publication that are tracked. Their names, with units: docs/runs.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.summary import prefix_figures
from slime_backend.publication import PublicationReport

PHASES = ("pause_ms", "flush_ms", "load_ms", "label_ms", "resume_ms", "paused_ms")


def rollout_metrics(
    row: Mapping[str, Any], records: Sequence[RolloutRecord], resubmitted: int
) -> dict[str, float | int | None]:
    """Of the batch of one step. `row`: its line in steps.jsonl; `resubmitted`: requests of the whole run so far."""
    return {
        "version_lag_mean": row["lag_mean"],
        "version_lag_max": row["lag_max"],
        "mixed_share": row["mixed_share"],
        "retracted_share": row["retracted_share"],
        **{f"class_{name}": number for name, number in row["classes"].items()},
        **{f"stale_{label}": number for label, number in row["staleness"].items()},
        "prefix_hit_rate": prefix_figures(list(records))["prefix_hit_rate_within_version"],
        "resubmitted": resubmitted,
    }


def publication_metrics(report: PublicationReport) -> dict[str, float]:
    """Of one publication; times in milliseconds, the slowest engine's."""

    def slowest(name: str) -> float:
        return max((getattr(e, name) or 0.0 for e in report.engines), default=0.0)

    return {
        **{f"{name}_max": slowest(name) for name in PHASES},
        "wall_ms": report.wall_ms,
        "confirmed": sum(e.confirmed for e in report.engines),
        "flushes_verified": sum(e.flush_verified for e in report.engines),
        "sweeps_verified": sum(e.sweep_verified for e in report.engines),
        "tokens_swept": sum(e.tokens_swept for e in report.engines),
        "in_flight": sum(e.in_flight for e in report.engines),
        "requests_retracted": sum(e.requests_retracted for e in report.engines),
        "tokens_to_prefill_again": sum(e.tokens_to_prefill_again for e in report.engines),
    }
