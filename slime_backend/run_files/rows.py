"""The rows of a run's own JSON lines files, with what each row must have; a row that lacks it is a damaged line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_backend.provenance.jsonl import scan_lines
from slime_backend.run_files.damage import Damage

Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_count(value: Any) -> bool:
    return type(value) is int


def _are_outcomes(value: Any) -> bool:
    return isinstance(value, list) and all(_fits(item, _OUTCOME) for item in value)


_OUTCOME: Mapping[str, Check] = {
    "engine": _is_text,
    **dict.fromkeys(("confirmed", "flush_verified", "sweep_verified"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("tokens_swept", "requests_retracted", "tokens_to_prefill_again"), _is_count),
    **dict.fromkeys(("pause_ms", "flush_ms", "verify_ms", "load_ms", "paused_ms"), _is_number_or_none),
}
NEEDED: Mapping[str, Mapping[str, Check]] = {
    "submitted.jsonl": {"receipt": _is_text},
    "unusable.jsonl": {"receipt": _is_text},
    "steps.jsonl": {"reward_mean": _is_number, "lag_mean": _is_number, "lag_max": _is_number},
    "publications.jsonl": {"version": _is_text, "state": _is_text, "engines": _are_outcomes},
}


def sound_rows(path: Path, damage: Damage | None = None) -> Iterator[dict[str, Any]]:
    """Every row of one of the files in NEEDED that has what a row must have; the others are counted in `damage`."""
    if not path.is_file():
        return
    found = Damage() if damage is None else damage
    needed = NEEDED[path.name]
    with path.open("rb") as file:
        for line in scan_lines(file, path):
            if line.damaged:
                found.add_line(path, line.number, line.damaged)
            elif line.record is not None and not _fits(line.record, needed):
                wrong = next(name for name, check in needed.items() if not check(line.record.get(name)))
                found.add_line(path, line.number, f"{wrong} is missing or has the wrong type")
            elif line.record is not None:
                yield line.record


def without_nan(value: Any) -> Any:
    """The same with null for NaN and the infinities, which strict JSON lacks: a training that diverged has them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _fits(row: Any, needed: Mapping[str, Check]) -> bool:
    return isinstance(row, Mapping) and all(check(row.get(name)) for name, check in needed.items())
