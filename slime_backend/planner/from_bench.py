"""`speeds_of` reads the speeds that `reef-slime bench modes` measured; its traffic is `Shape.traffic`."""

from __future__ import annotations

from slime_backend.planner.measured import ModeResults
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.work import Mode

CALIBRATED_BY: Mode = "scoped"


def speeds_of(results: ModeResults) -> Speeds:
    """Return the speeds of an engine alone and the pause of one mode; all else in the slices is left to predict."""
    alone = results.typical_speeds()
    pauses_ms = sorted(s.paused_ms for s in results.slices if s.mode == CALIBRATED_BY)
    return Speeds(
        prefill=alone.prefill_tokens_per_s,
        decode=alone.decode_tokens_per_s,
        standstill_s=pauses_ms[len(pauses_ms) // 2] / 1000,
        admission_s=alone.admission_ms / 1000,
    )
