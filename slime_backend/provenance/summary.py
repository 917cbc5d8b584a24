"""`summary.json`: what a run did, counted from the files that it wrote.

Counting from the files rather than from memory makes the summary of an interrupted or resumed run as true as that of
a clean one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime_backend.provenance.classes import count_classes
from slime_backend.provenance.damage import Damage
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.run_rows import sound_rows, without_nan
from slime_backend.provenance.segments import read_records


def summarise(run_dir: Path) -> dict[str, Any]:
    """The figures of `submitted.jsonl`, the ledger, `publications.jsonl` and `steps.jsonl`."""
    damage, ledger_damage = Damage(), Damage()
    submitted = [row["receipt"] for row in sound_rows(run_dir / "submitted.jsonl", damage)]
    records = list(read_records(run_dir, ledger_damage))
    unusable = {row["receipt"] for row in sound_rows(run_dir / "unusable.jsonl", damage)}
    publications = list(sound_rows(run_dir / "publications.jsonl", damage))
    steps = list(sound_rows(run_dir / "steps.jsonl", damage))
    completed = [r.receipt for r in records]
    missing = len(set(submitted) - set(completed) - unusable)
    damaged = min(missing, ledger_damage.lines)  # they came back, and can't be read anymore
    damage.merge(ledger_damage)
    rewards = [s["reward_mean"] for s in steps]
    outcomes = [e for p in publications for e in p["engines"]]
    return {
        "steps": len(steps),
        "publications": sum(p["state"] == "resumed" for p in publications),
        "publications_failed": sum(p["state"] == "failed" for p in publications),
        "engines_confirmed_each": sorted(
            {sum(e["confirmed"] for e in p["engines"]) for p in publications if p["state"] != "unknown"}
        ),
        "publications_unknown": sum(p["state"] == "unknown" for p in publications),
        "flushes_verified": sum(e["flush_verified"] for e in outcomes),
        "sweeps_verified": sum(e["sweep_verified"] for e in outcomes),
        "tokens_swept": sum(e["tokens_swept"] for e in outcomes),
        "publications_with_retractions": sum(any(e["requests_retracted"] for e in p["engines"]) for p in publications),
        "requests_retracted": sum(e["requests_retracted"] for e in outcomes),
        "tokens_to_prefill_again": sum(e["tokens_to_prefill_again"] for e in outcomes),
        "paused_ms_median": _median([e["paused_ms"] for e in outcomes if e["paused_ms"] is not None]),
        "pause_to_verified_ms_median": _median(
            [e["pause_ms"] + e["flush_ms"] for e in outcomes if e["pause_ms"] is not None and e["flush_ms"] is not None]
        ),
        "load_ms_median": _median([e["load_ms"] for e in outcomes if e["load_ms"] is not None]),
        "rollouts_submitted": len(submitted),
        "rollouts_completed": len(completed),
        "rollouts_lost": missing - damaged,
        "rollouts_damaged": damaged,
        "rollouts_unusable": len(unusable),
        "damaged_lines": damage.lines,
        "damaged_segments": damage.segments,
        "damaged_places": damage.places,
        "rollouts_doubled": len(completed) - len(set(completed)),
        "rollouts_aborted": sum(r.finish_reason == "abort" for r in records),
        "rollout_classes": count_classes(r.rollout_class for r in records),  # adds up to rollouts_completed
        "rollouts_mixed": sum(r.mixed for r in records),
        "rollouts_carried": sum(r.carried for r in records),
        "rollouts_retracted": sum(r.retractions > 0 for r in records),
        "reward_first3": _mean(rewards[:3]),
        "reward_last3": _mean(rewards[-3:]),
        "version_lag_mean": _mean([s["lag_mean"] for s in steps]),
        "version_lag_max": max([s["lag_max"] for s in steps], default=0),
        "staleness": _added(s.get("staleness", {}) for s in steps),
        **prefix_figures(records),
    }


def prefix_figures(records: list[RolloutRecord]) -> dict[str, Any]:
    """Hit rate inside a version, and what the first admissions after each publication found in the cache.

    The first admission of an engine's weight epoch (order 0) can't hit anything and is what makes the others hit, so
    it is left out of the rate inside a version and reported by itself.
    """
    prefills = [p for r in records for p in r.prefills]
    later = [p for p in prefills if p.order > 0]
    # Epoch 0 is the engine's start: no publication came before it.
    first = [p for p in prefills if p.order == 0 and p.epoch > 0]
    return {
        "prefills": len(prefills),
        "prefix_hit_rate_within_version": (
            sum(p.cached for p in later) / max(1, sum(p.total for p in later)) if later else None
        ),
        "first_after_publication": len(first),
        "cached_tokens_first_after_publication_max": max((p.cached for p in first), default=0),
    }


def write_summary(run_dir: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Write and return the summary. Written beside its place and renamed, so that it is whole or old."""
    summary = {**summarise(run_dir), **extra}
    partial = run_dir / ".summary.json.partial"
    partial.write_text(json.dumps(without_nan(summary), indent=2, allow_nan=False) + "\n")
    partial.rename(run_dir / "summary.json")
    return summary


def _added(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of each key."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: list[float]) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
