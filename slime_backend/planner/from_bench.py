"""Speeds of what `reef-slime bench modes` measured; its traffic is `Shape.traffic` (bench/mode_load.py)."""

from __future__ import annotations

from slime_backend.planner.measured import ModeResults
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.work import Mode

CALIBRATED_BY: Mode = "scoped"


def speeds_of(results: ModeResults) -> Speeds:
    """Of an engine alone, and the standstill of one mode; every other figure of the slices is left to be predicted."""
    alone = results.typical_speeds()
    stops = sorted(s.paused_ms for s in results.slices if s.mode == CALIBRATED_BY)
    return Speeds(
        prefill=alone.prefill_tokens_per_s,
        decode=alone.decode_tokens_per_s,
        standstill_s=stops[len(stops) // 2] / 1000,
        admission_s=alone.admission_ms / 1000,
    )
