"""What one publication did: its state, each engine's outcome, and the errors that carry them.

    state   open -> paused -> verified -> loaded -> weights verified -> labelled -> resumed        (or failed)
    step    prepare, look, pause, flush or verify, load, weights, label, resume

A state says how far the whole publication is, a step what one engine is asked to do; an engine fails at a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from slime_backend.errors import EngineFault, ReefError
from slime_backend.policy import Policy
from slime_backend.wire import Loads, SchedulerReport

State = Literal["open", "paused", "verified", "loaded", "weights verified", "labelled", "resumed", "failed"]
# `flush` empties the cache and reads its evidence; `verify` reads the evidence of a pause that keeps the cache.
Step = Literal["prepare", "look", "pause", "flush", "verify", "load", "weights", "label", "resume"]
TIMED: tuple[Step, ...] = tuple(step for step in get_args(Step) if step != "prepare")  # on each engine


class NotConfirmed(EngineFault, RuntimeError):
    """An engine's own counts contradict, or don't prove, what a step was meant to do."""


class PublicationError(ReefError, RuntimeError):
    """No engine reached the new version. `report` says what happened on each."""

    def __init__(self, report: PublicationReport) -> None:
        reasons = "; ".join(f"{e.failed_step}: {e.reason}" for e in report.engines if e.reason)
        super().__init__(f"publication of {report.version} failed on every engine: {reasons or 'no engines'}")
        self.report = report


@dataclass(slots=True)
class EngineOutcome:
    """What one engine did in one publication. Times are milliseconds."""

    engine: str
    times: dict[Step, float] = field(default_factory=dict)  # of each step that it reached, confirmed or not
    paused_ms: float | None = (
        None  # from the pause being sent to the resume being answered; None: it wasn't shown to resume, or never paused
    )
    in_flight: int = 0  # requests that its schedulers knew at the pause
    requests_retracted: int = 0
    tokens_to_prefill_again: int = 0
    flush_verified: bool = False
    sweep_verified: bool = False
    weights_verified: bool | None = None  # by content; None: nothing could be compared, see `weights_not_verified`
    weights_not_verified: str = ""  # why nothing was looked at
    tensors_verified: int = 0  # of all ranks, shown to be what was sent
    tensors_looked_at: int = 0
    tokens_swept: int = 0  # cache entries of older weights that the sweep evicted
    confirmed: bool = False
    stayed: bool = False  # not confirmed and not retired: no engine was confirmed, and its weights weren't touched
    failed_step: Step | Literal[""] = ""
    reason: str = ""
    evidence: list[SchedulerReport] = field(default_factory=list)  # per rank, after the pause and flush
    loads: list[Loads] = field(default_factory=list)  # per rank and tensor rank, after the load
    dtype: str = ""  # as it was started with: what an audit expects of its log-probs

    def fail(self, step: Step, reason: str) -> None:
        """Record a failure. The first one is what explains the outcome: a later one (the resume of an engine that had
        already failed) is added to its reason."""
        reason = reason or "no reason was given"
        if self.failed_step:
            self.reason += f"; {step}: {reason}"
        else:
            self.failed_step, self.reason = step, reason

    @property
    def fate(self) -> Literal["confirmed", "left as it was", "retired"]:
        return "confirmed" if self.confirmed else "left as it was" if self.stayed else "retired"

    def row_times(self) -> dict[str, float | None]:
        """The times as a recorded row has them: `pause_ms` and so on; None where a step wasn't reached."""
        return {f"{step}_ms": self.times.get(step) for step in TIMED}


@dataclass(slots=True)
class PublicationReport:
    version: str
    previous_version: str
    policy: Policy
    transport: str
    state: State = "open"
    started_at: float = 0.0  # seconds since the epoch
    prepare_ms: float = 0.0
    verified_ms: float | None = None  # from the first pause sent until the last engine is paused, flushed and verified
    wall_ms: float = 0.0  # pause to resumed, over all engines
    engines: list[EngineOutcome] = field(default_factory=list)
    digests: dict[str, Any] | None = None  # of the confirmed engines' weights: a line of weight_digests.jsonl

    @property
    def unconfirmed(self) -> dict[str, str]:
        return {e.engine: f"{e.failed_step}: {e.reason}" for e in self.engines if not e.confirmed}

    def to_json(self) -> dict[str, Any]:
        """The report as a line of publications.jsonl: each engine's times stand in it as `<step>_ms`.

        `policy` is its sentence, for people; `policy_fields` are its facts (run_files/rows.py reads them).
        """
        row = {**asdict(self), "policy": str(self.policy), "policy_fields": asdict(self.policy)}
        del row["digests"]
        for outcome, recorded in zip(self.engines, row["engines"], strict=True):
            del recorded["times"]
            recorded |= outcome.row_times()
        return row


def times_of(recorded: Mapping[str, Any]) -> dict[Step, float]:
    """The times of the steps that one engine reached, from its part of a line of publications.jsonl.

    Lines that were written before there was a step `verify` have its time under `flush`.
    """
    found = {step: recorded.get(f"{step}_ms") for step in TIMED}
    return {step: ms for step, ms in found.items() if ms is not None}


def pause_to_verified_ms(times: Mapping[Step, float]) -> float | None:
    """From one engine's pause until its own counts had shown it; None where it didn't come so far."""
    shown = times.get("flush", times.get("verify"))
    return times["pause"] + shown if "pause" in times and shown is not None else None
