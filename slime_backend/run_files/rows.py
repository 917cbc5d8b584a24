"""The rows of a run's own JSON lines files, with what each row must have; a row that lacks it is a damaged line.

Also the policy of a publication's row, whose facts are fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from slime_backend.policy import AfterPause, Layout, PauseMode, Policy, PrefixSharing
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import scan_lines

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
_RUN = RunDir(Path())
NEEDED: Mapping[str, Mapping[str, Check]] = {
    _RUN.submitted.name: {"receipt": _is_text},
    _RUN.unusable.name: {"receipt": _is_text},
    _RUN.steps.name: {"reward_mean": _is_number, "lag_mean": _is_number, "lag_max": _is_number},
    _RUN.publications.name: {"version": _is_text, "state": _is_text, "engines": _are_outcomes},
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


_POLICY: Mapping[str, tuple[object, ...]] = {  # field of Policy -> what it may be
    "layout": get_args(Layout),
    "prefix_sharing": get_args(PrefixSharing),
    "pause_mode": get_args(PauseMode),
    "radix_cache": (True, False),
    "after_pause": get_args(AfterPause),
}


def policy_of(row: Mapping[str, Any]) -> Policy | None:
    """The policy of a publication's row; None where this version knows no such policy, or the row names none."""
    facts = row.get("policy_fields")
    return _policy(facts if isinstance(facts, Mapping) else _facts_of_sentence(str(row.get("policy"))))


def _facts_of_sentence(sentence: str) -> dict[str, Any]:
    """The facts of a row that was written before they were fields: it has the policy's sentence alone."""
    found = re.fullmatch(
        r"(?P<layout>\w+), prefix sharing (?P<prefix_sharing>\w+): pause (?P<pause_mode>\w+), "
        r"radix cache (?P<radix_cache>on|off), then (?P<after_pause>\w+)",
        sentence,
    )
    if found is None:
        return {}
    return {**found.groupdict(), "radix_cache": found["radix_cache"] == "on"}


def _policy(facts: Mapping[str, Any]) -> Policy | None:
    known = {name: facts.get(name) for name in _POLICY}
    if any(value not in _POLICY[name] for name, value in known.items()):
        return None
    return Policy(**known)  # type: ignore[arg-type]


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
