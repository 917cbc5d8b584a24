"""`summary.json`: what a run did, counted from the files that it wrote.

Counting from the files rather than from memory makes the summary of an interrupted or resumed run as true as that of
a clean one.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.ledger.files import read_records
from slime_backend.provenance.classes import CLASSES, RolloutClass
from slime_backend.provenance.records import RolloutRecord
from slime_backend.publication import pause_to_verified_ms, times_of
from slime_backend.report.bounded import Median, ReceiptCounts
from slime_backend.run_files import RunDir, replace_file
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.rows import sound_rows, without_nan

ENGINE_SUMS = (  # over publications and engines
    "flush_verified",
    "sweep_verified",
    "tokens_swept",
    "requests_retracted",
    "tokens_to_prefill_again",
)


def summarise(run_dir: Path) -> dict[str, Any]:
    """The figures of `submitted.jsonl`, the ledger, `publications.jsonl` and `steps.jsonl`.

    Reads each once, row by row, in memory of a fixed size whatever the length of the run.
    """
    run = RunDir(run_dir)
    damage, ledger_damage = Damage(), Damage()
    figures = {
        **_steps(sound_rows(run.steps, damage)),
        **_publications(sound_rows(run.publications, damage)),
        **_rollouts(
            sound_rows(run.submitted, damage),
            sound_rows(run.unusable, damage),
            read_records(run_dir, ledger_damage),
        ),
    }
    damaged = min(figures["rollouts_lost"], ledger_damage.lines)  # they came back, and can't be read anymore
    figures["rollouts_lost"] -= damaged
    damage.merge(ledger_damage)
    return {
        **figures,
        "rollouts_damaged": damaged,
        "damaged_lines": damage.lines,
        "damaged_segments": damage.segments,
        "damaged_places": damage.places,
    }


def _steps(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    first: list[float] = []
    last: deque[float] = deque(maxlen=3)
    staleness: Counter[str] = Counter()
    count, lag_total, lag_max = 0, 0.0, 0
    for row in rows:
        count += 1
        if len(first) < 3:
            first.append(row["reward_mean"])
        last.append(row["reward_mean"])
        lag_total += row["lag_mean"]
        lag_max = max(lag_max, row["lag_max"])
        staleness.update(row.get("staleness", {}))
    return {
        "steps": count,
        "reward_first3": _mean(first),
        "reward_last3": _mean(list(last)),
        "version_lag_mean": lag_total / count if count else None,
        "version_lag_max": lag_max,
        "staleness": dict(staleness),
    }


def _publications(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    confirmed_each: set[int] = set()
    paused, verified, loaded = Median(), Median(), Median()
    for row in rows:
        counts[row["state"]] += 1
        engines = row["engines"]
        if row["state"] != "unknown":
            confirmed_each.add(sum(e["confirmed"] for e in engines))
        counts["with_retractions"] += any(e["requests_retracted"] for e in engines)
        for engine in engines:
            for name in ENGINE_SUMS:
                counts[name] += engine[name]
            if engine["confirmed"]:  # lines of earlier versions don't say
                counts["weights_verified"] += engine.get("weights_verified") is True
                counts["weights_not_verified"] += engine.get("weights_verified") is not True
            counts["tensors_verified"] += engine.get("tensors_verified") or 0
            if engine["paused_ms"] is not None:
                paused.add(engine["paused_ms"])
            times = times_of(engine)
            if (shown := pause_to_verified_ms(times)) is not None:
                verified.add(shown)
            if "load" in times:
                loaded.add(times["load"])
    return {
        "publications": counts["resumed"],
        "publications_failed": counts["failed"],
        "publications_unknown": counts["unknown"],
        "engines_confirmed_each": sorted(confirmed_each),
        "flushes_verified": counts["flush_verified"],
        "sweeps_verified": counts["sweep_verified"],
        "weights_verified": counts["weights_verified"],
        "weights_not_verified": counts["weights_not_verified"],
        "tensors_verified": counts["tensors_verified"],
        "tokens_swept": counts["tokens_swept"],
        "publications_with_retractions": counts["with_retractions"],
        "requests_retracted": counts["requests_retracted"],
        "tokens_to_prefill_again": counts["tokens_to_prefill_again"],
        "paused_ms_median": paused.value,
        "pause_to_verified_ms_median": verified.value,
        "load_ms_median": loaded.value,
    }


def _rollouts(
    submitted: Iterable[Mapping[str, Any]], unusable: Iterable[Mapping[str, Any]], stored: Iterable[RolloutRecord]
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    of_classes: Counter[RolloutClass] = Counter()
    prefixes = PrefixFigures()
    with ReceiptCounts() as receipts:
        for row in submitted:
            receipts.submitted(row["receipt"])
        for row in unusable:
            receipts.unusable(row["receipt"])
        for record in stored:
            receipts.completed(record.receipt)
            of_classes[record.rollout_class] += 1
            counts["aborted"] += record.finish_reason == "abort"
            counts["mixed"] += record.mixed
            counts["carried"] += record.carried
            counts["retracted"] += record.retractions > 0
            counts["measured"] += record.measured
            counts["contradicted"] += record.contradicted
            prefixes.add(record)
        lost, doubled = receipts.lost_and_doubled()
        return {
            "rollouts_submitted": receipts.sent,
            "rollouts_completed": receipts.back,
            "rollouts_lost": lost,
            "rollouts_unusable": receipts.not_usable,
            "rollouts_doubled": doubled,
            "rollouts_aborted": counts["aborted"],
            "rollout_classes": {name: of_classes[name] for name in CLASSES},  # adds up to rollouts_completed
            "rollouts_mixed": counts["mixed"],
            "rollouts_carried": counts["carried"],
            "rollouts_retracted": counts["retracted"],
            "rollouts_measured": counts["measured"],
            "kv_contradictions": counts["contradicted"],
            **prefixes.figures(),
        }


@dataclass(slots=True)
class PrefixFigures:
    """Hit rate inside a version, and what the first admissions after each publication found in the cache.

    The first admission of an engine's weight epoch (order 0) can't hit anything and is what makes the others hit, so
    it is left out of the rate inside a version and reported by itself.
    """

    prefills: int = 0
    later_cached: int = 0
    later_total: int = 0
    later: int = 0
    first: int = 0
    first_cached_max: int = 0

    def add(self, record: RolloutRecord) -> None:
        for prefill in record.prefills:
            self.prefills += 1
            if prefill.order > 0:
                self.later += 1
                self.later_cached += prefill.cached
                self.later_total += prefill.total
            elif prefill.epoch > 0:  # epoch 0 is the engine's start: no publication came before it
                self.first += 1
                self.first_cached_max = max(self.first_cached_max, prefill.cached)

    def figures(self) -> dict[str, Any]:
        return {
            "prefills": self.prefills,
            "prefix_hit_rate_within_version": self.later_cached / max(1, self.later_total) if self.later else None,
            "first_after_publication": self.first,
            "cached_tokens_first_after_publication_max": self.first_cached_max,
        }


def prefix_figures(records: Iterable[RolloutRecord]) -> dict[str, Any]:
    """`PrefixFigures` of these."""
    found = PrefixFigures()
    for record in records:
        found.add(record)
    return found.figures()


def write_summary(run_dir: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Write and return the summary."""
    summary = {**summarise(run_dir), **extra}
    text = json.dumps(without_nan(summary), indent=2, allow_nan=False) + "\n"
    replace_file(RunDir(run_dir).summary, text)
    return summary


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
