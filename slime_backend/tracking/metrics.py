"""The figures of a step and of its publication that are tracked. Their names, with units: docs/runs.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from slime_backend.provenance.records import RolloutRecord
from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.report.summary import prefix_figures
from slime_backend.tracking.columns import StepMetrics

PHASES = ("pause_ms", "flush_ms", "verify_ms", "load_ms", "weights_ms", "label_ms", "resume_ms", "paused_ms")


def of_rollouts(records: Sequence[RolloutRecord], resubmitted: int) -> dict[str, Any]:
    """What steps.jsonl has of a step's rollouts so that their metrics can be logged from it once more."""
    rate = prefix_figures(list(records))["prefix_hit_rate_within_version"]
    return {
        "prefix_hit_rate": rate,
        "resubmitted": resubmitted,
        "kv_measured_share": sum(r.measured for r in records) / max(1, len(records)),
        "kv_contradictions": sum(r.contradicted for r in records),
    }


def rollout_metrics(
    row: Mapping[str, Any], records: Sequence[RolloutRecord], resubmitted: int
) -> dict[str, float | int | None]:
    """Of the batch of one step. `row`: its line in steps.jsonl; `resubmitted`: requests of the whole run so far."""
    return rollout_row_metrics({**row, **of_rollouts(records, resubmitted)})


def rollout_row_metrics(row: Mapping[str, Any]) -> dict[str, float | int | None]:
    """As `rollout_metrics`, of a line in steps.jsonl that has `of_rollouts` too."""
    return {
        "version_lag_mean": row["lag_mean"],
        "version_lag_max": row["lag_max"],
        "mixed_share": row["mixed_share"],
        "retracted_share": row["retracted_share"],
        **{f"class_{name}": number for name, number in row["classes"].items()},
        **{f"stale_{label}": number for label, number in row["staleness"].items()},
        "prefix_hit_rate": row.get("prefix_hit_rate"),
        "resubmitted": row.get("resubmitted"),
        "kv_measured_share": row.get("kv_measured_share"),
        "kv_contradictions": row.get("kv_contradictions"),
    }


def train_metrics(row: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Of the trainer's step. `row`: its line in steps.jsonl, of any version of this program."""
    return {f.name: row[f.name] for f in fields(StepMetrics) if f.name in row}


def publication_metrics(report: PublicationReport) -> dict[str, float]:
    """Of one publication; times in milliseconds, the slowest engine's."""
    return publication_row_metrics({"wall_ms": report.wall_ms, "engines": [_figures(e) for e in report.engines]})


def publication_row_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """As `publication_metrics`, of a line in publications.jsonl."""
    engines = row["engines"]

    def slowest(name: str) -> float:
        return max((e.get(name) or 0.0 for e in engines), default=0.0)

    def total(name: str) -> int:
        return sum(e.get(name) or 0 for e in engines)

    return {
        **{f"{name}_max": slowest(name) for name in PHASES},
        "wall_ms": row["wall_ms"],
        "confirmed": total("confirmed"),
        "flushes_verified": total("flush_verified"),
        "sweeps_verified": total("sweep_verified"),
        "weights_verified": sum(e.get("weights_verified") is True for e in engines),
        "tensors_verified": total("tensors_verified"),
        "tokens_swept": total("tokens_swept"),
        "in_flight": total("in_flight"),
        "requests_retracted": total("requests_retracted"),
        "tokens_to_prefill_again": total("tokens_to_prefill_again"),
    }


def _figures(outcome: EngineOutcome) -> dict[str, Any]:
    return {f.name: getattr(outcome, f.name) for f in fields(outcome)} | outcome.row_times()
