"""This reads traffic and speeds of a recorded run from its ledger and its publications."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.ledger.files import read_records
from slime_backend.planner.predict import predict
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import PlanError, Traffic, quantiles
from slime_backend.planner.work import Mode
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.run_files.rows import policy_of

TOGETHER_S = 0.05  # requests of a group that were sent within this time reach the engine at once
SLOWEST, FASTEST = 1e-2, 1e8  # tokens per second, the bounds of the search for a speed
BISECTIONS = 80


@dataclass(frozen=True, slots=True)
class Recorded:
    """This is what a run did per engine, to compare predictions with."""

    mode: Mode  # its policy's
    traffic: Traffic
    standstill_s: float  # median, pause to resume
    tokens_per_s: float  # in finished answers
    prefilled_per_token: float
    mixed_share: float


def read_recorded(run_dir: Path, chunk: float) -> Recorded:
    """Read a run. Raises PlanError where it has too little to plan with."""
    records = list(read_records(run_dir))
    publications = [
        p
        for p in read_jsonl(RunDir(run_dir).publications)
        if p.get("state") == "resumed" and {type(p.get("started_at")), type(p.get("wall_ms"))} <= {int, float}
    ]
    if len(records) < 2 or len(publications) < 2:
        raise PlanError(
            f"{run_dir}: {len(records)} rollouts and {len(publications)} publications are too few to plan with; give a "
            "longer run, or the traffic by flags"
        )
    engines = len({r.engine for r in records})
    seconds = _busy_s(records)
    if seconds <= 0:
        raise PlanError(f"{run_dir}: its rollouts take no time; the clock of the machine was set back in between")
    tokens = sum(len(r.output_ids) for r in records)
    groups = _groups(records)
    starts = sorted(p["started_at"] for p in publications)
    traffic = Traffic(
        prompt=statistics.fmean(len(r.prompt_ids) for r in records),
        shared=_common_prefix([group[0].prompt_ids for group in groups]),
        # Its requests are spread over the engines, and only those on one find each other's prompt.
        group=max(1.0, statistics.fmean(map(len, groups)) / engines),
        answers=quantiles([max(1, len(r.output_ids)) for r in records]),
        # Little's law: the sum of the requests' times in flight over the elapsed time.
        in_flight=sum(r.finished_at - r.submitted_at for r in records) / seconds / engines,
        period_s=statistics.median(b - a for a, b in itertools.pairwise(starts)),
        chunk=chunk,
        together=statistics.median(_spread(group) for group in groups) < TOGETHER_S,
    )
    return Recorded(
        mode=_mode(publications[-1], run_dir),
        traffic=traffic,
        standstill_s=statistics.median(p["wall_ms"] for p in publications) / 1000,
        tokens_per_s=tokens / seconds / engines,
        prefilled_per_token=sum(p.total - p.cached for r in records for p in r.prefills) / max(1, tokens),
        mixed_share=statistics.fmean(r.mixed for r in records),
    )


def fit_speeds(recorded: Recorded, prefill_to_decode: float) -> Speeds:
    """Fit the speeds, in this ratio, at which the run's own mode would finish what the run did.

    Raises PlanError where no speed explains it.
    """

    def at(decode: float) -> Speeds:
        return Speeds(prefill_to_decode * decode, decode, recorded.standstill_s)

    def finished(decode: float) -> float:
        return predict(recorded.mode, recorded.traffic, at(decode)).tokens_per_s

    low, high = SLOWEST, FASTEST
    if finished(high) < recorded.tokens_per_s:
        raise PlanError(
            f"the run's engines finished {recorded.tokens_per_s:.0f} tokens per second between pauses of "
            f"{recorded.standstill_s:.2f} s, which no speed explains; give --prefill-speed and --decode-speed"
        )
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if finished(middle) < recorded.tokens_per_s else (low, middle)
    return at(high)


def _busy_s(records: Sequence[RolloutRecord]) -> float:
    """Return the seconds with requests in flight: an interrupted run had none until it was resumed."""
    busy, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda r: r.submitted_at):
        busy += max(0.0, record.finished_at - max(record.submitted_at, until))
        until = max(until, record.finished_at)
    return busy


def _groups(records: Sequence[RolloutRecord]) -> list[list[RolloutRecord]]:
    found: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        found[record.group].append(record)
    return list(found.values())


def _spread(group: Sequence[RolloutRecord]) -> float:
    sent = [r.submitted_at for r in group]
    return max(sent) - min(sent)


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> float:
    first, last = min(prompts), max(prompts)  # what these two share, all between share
    different = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(different, min(len(first), len(last)))


def _mode(publication: Mapping[str, Any], run_dir: Path) -> Mode:
    """Return the planner's mode for a publication's policy."""
    policy = policy_of(publication)
    if policy is not None and policy.layout == "colocated":
        return "retract"
    if policy is None or policy.prefix_sharing == "unsafe":
        named = str(policy or publication.get("policy"))
        raise PlanError(f"{run_dir}: its publications' policy is {named!r}, which the planner has no formula for")
    return policy.prefix_sharing


def to_json(recorded: Recorded) -> dict[str, Any]:
    return {
        "mode": recorded.mode,
        "tokens_per_s": recorded.tokens_per_s,
        "prefilled_per_token": recorded.prefilled_per_token,
        "mixed_share": recorded.mixed_share,
    }
