"""The publication transaction: move every updatable engine from one weight version to the next, verified.

    open -> paused -> verified -> loaded -> labelled -> resumed        (or failed)

    transport.prepare   bytes made ready while the engines still generate
    look                each scheduler's counts, to compare with; still generating
    pause               every engine at once
    flush + verify      after a retracting pause: each engine, each data-parallel rank, by its scheduler's own counts
    load                the transport moves the bytes; no label yet. Scoped entries are swept as the load begins
    label + confirm     once every surviving engine has loaded: name the version, read it and the sweep's evidence back
    resume + verify     always, in `finally`, also after an unknown outcome

Anything but a positive confirmation counts as a refusal. An engine that isn't confirmed at the new version is retired
from routing and named; the others go on. All steps run on all engines at once and have deadlines.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.errors import EngineFault, ReefError
from slime_backend.evidence import (
    why_not_flushed,
    why_not_loaded,
    why_not_paused,
    why_not_running,
    why_not_swept,
    why_not_updated,
)
from slime_backend.fleet import Fleet, FleetError, Member, readmit_retired
from slime_backend.fleet.membership import instances_of, recognise
from slime_backend.policy import Policy
from slime_backend.transports import Transport, is_counted, refused_by
from slime_backend.wire import Loads, SchedulerReport

T = TypeVar("T")
State = Literal["open", "paused", "verified", "loaded", "labelled", "resumed", "failed"]
IDENTIFY_S = 2.5
FLUSH_RETRY_S = 0.01  # an overlapped batch drains in milliseconds; the deadline bounds the number of tries
RESUME_TRIES = 3
MAX_FLUSH_RETRY_S = 0.5
GRAMMAR_MOMENTS, GRAMMAR_MOMENT_S = 5, 1.0  # resumed so often, for at most so long each, until grammars are compiled


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
    """What one engine did in one publication. Times are milliseconds; None where a step wasn't reached."""

    engine: str
    pause_ms: float | None = None
    flush_ms: float | None = None  # flush and the reading of its evidence
    load_ms: float | None = None
    label_ms: float | None = None
    resume_ms: float | None = None
    paused_ms: float | None = None  # from the pause being sent to the resume being answered
    in_flight: int = 0  # requests that its schedulers knew at the pause
    requests_retracted: int = 0
    tokens_to_prefill_again: int = 0
    flush_verified: bool = False
    sweep_verified: bool = False
    tokens_swept: int = 0  # cache entries of older weights that the sweep evicted
    confirmed: bool = False
    failed_step: str = ""
    reason: str = ""
    evidence: list[SchedulerReport] = field(default_factory=list)  # per rank, after the pause and flush
    loads: list[Loads] = field(default_factory=list)  # per rank and tensor rank, after the load


@dataclass(slots=True)
class PublicationReport:
    version: str
    previous_version: str
    policy: str
    transport: str
    state: State = "open"
    started_at: float = 0.0  # seconds since the epoch
    prepare_ms: float = 0.0
    verified_ms: float | None = None  # from the first pause sent until the last engine is paused, flushed and verified
    wall_ms: float = 0.0  # pause to resumed, over all engines
    engines: list[EngineOutcome] = field(default_factory=list)

    @property
    def unconfirmed(self) -> dict[str, str]:
        return {e.engine: f"{e.failed_step}: {e.reason}" for e in self.engines if not e.confirmed}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Target:
    """One engine under publication."""

    member: Member
    outcome: EngineOutcome
    before: list[SchedulerReport] = field(default_factory=list)
    at_pause: list[SchedulerReport] = field(default_factory=list)  # those that proved the pause, or the flush in it
    touched: bool = False  # its weights may have changed

    @property
    def client(self) -> EngineClient:
        return self.member.client


async def _on_all(targets: Sequence[_Target], step: str, action: Callable[[_Target], Awaitable[None]]) -> list[_Target]:
    """Run one step on every engine at once; return those that confirmed it, note the reason on the others."""

    async def one(target: _Target) -> bool:
        started = time.perf_counter()
        try:
            await action(target)
        except (EngineFault, FleetError) as error:
            target.outcome.failed_step = step
            target.outcome.reason = getattr(error, "seen", str(error))
            return False
        finally:
            if hasattr(target.outcome, f"{step}_ms"):
                setattr(target.outcome, f"{step}_ms", _ms(started))
        return True

    # All are awaited before an unexpected error goes on: nothing may still be under way when the engines are resumed.
    kept = await asyncio.gather(*(one(t) for t in targets), return_exceptions=True)
    for result in kept:
        if isinstance(result, BaseException):
            raise result
    return [t for t, ok in zip(targets, kept, strict=True) if ok]


async def pause_generation_for_update(targets: Sequence[_Target], policy: Policy) -> list[_Target]:
    """Pause every engine; then, after a retracting pause, flush every engine and verify each rank's evidence.

    Returns the engines that may now be loaded. The barrier between the two steps is what makes a refusal cheap: no
    engine has lost its cache while another still refuses to pause.
    """

    async def pause(target: _Target) -> None:
        await target.client.pause(policy.pause_mode)

    async def flush(target: _Target) -> None:
        # A pause is dispatched without an acknowledgement (SGLang 0.5.23, tokenizer_manager.py): the schedulers'
        # own counts, read behind it on the same queue, are the acknowledgement.
        if policy.after_pause == "flush":
            after = await _flush_until_empty(target, policy)
            target.outcome.flush_verified = True
        else:
            after = await _until_paused(target, policy)
        target.at_pause = target.outcome.evidence = after
        target.outcome.in_flight = sum(r.kv.in_flight_at_pause for r in after)
        target.outcome.requests_retracted = sum(r.kv.retracted_at_pause for r in after)
        target.outcome.tokens_to_prefill_again = sum(r.kv.tokens_at_pause for r in after)

    paused = await _on_all(targets, "pause", pause)
    return await _on_all(paused, "flush", flush)


def _look(fleet: Fleet) -> Callable[[_Target], Awaitable[None]]:
    async def look(target: _Target) -> None:
        target.before = await target.client.reports()
        await recognise(fleet, target.member, target.before)

    return look


async def _until_paused(target: _Target, policy: Policy) -> list[SchedulerReport]:
    until = time.monotonic() + target.client.deadlines.pause
    while True:
        after = await target.client.reports()
        reasons = why_not_paused(target.before, after, policy)
        if not reasons:
            return after
        if time.monotonic() > until:
            raise NotConfirmed(target.member.name, "; ".join(reasons))
        await asyncio.sleep(FLUSH_RETRY_S)


async def _flush_until_empty(target: _Target, policy: Policy) -> list[SchedulerReport]:
    """Flush until the evidence says empty, or the deadline. The HTTP answer alone decides nothing."""
    until = time.monotonic() + target.client.deadlines.flush
    wait = FLUSH_RETRY_S
    moments = 0
    while True:
        answer = "the engine answered success"
        try:
            await target.client.flush()
        except EngineError as error:  # refused, or its outcome is unknown: the evidence decides
            answer = error.seen
        after = await target.client.reports()
        reasons = why_not_flushed(target.before, after, policy)
        if not reasons:
            return after
        if time.monotonic() > until:
            raise NotConfirmed(target.member.name, f"flush not verified ({answer}): {'; '.join(reasons)}")
        if _only_grammars_refuse(target.before, after):
            if moments == GRAMMAR_MOMENTS:
                raise NotConfirmed(
                    target.member.name,
                    f"requests wait for their grammars, and no flush passes meanwhile ({answer}): "
                    f"{'; '.join(reasons)}; start the engine with the hook grammar_flush",
                )
            moments += 1
            await _let_grammars_in(target, policy)
            continue
        await asyncio.sleep(wait)
        wait = min(2 * wait, MAX_FLUSH_RETRY_S)


def _only_grammars_refuse(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> bool:
    return any(
        new.kv.only_grammars_wait and new.kv.flush_epoch <= old.kv.flush_epoch and new.missing_hooks(("grammar_flush",))
        for old, new in zip(before, after, strict=False)
    )


async def _let_grammars_in(target: _Target, policy: Policy) -> None:
    """Resume an engine whose flush is refused only because requests wait for their grammars, and pause it again.

    A paused scheduler doesn't look whether a grammar is ready (0.5.23, managers/scheduler.py:2034). What it generates
    in between is of the old weights, as before the first pause; the evidence is counted from the second.
    """
    await target.client.resume()
    until = time.monotonic() + GRAMMAR_MOMENT_S
    while any(r.kv.grammar_queue for r in await target.client.reports()) and time.monotonic() < until:
        await asyncio.sleep(FLUSH_RETRY_S)
    before = await target.client.reports()
    if reasons := why_not_running(target.before, before):
        raise NotConfirmed(target.member.name, "; ".join(reasons))
    target.before = before
    await target.client.pause(policy.pause_mode)


async def publish(fleet: Fleet, transport: Transport, version: str, *, readmit: bool = True) -> PublicationReport:
    """Publish `version` to every updatable engine of the fleet; retired ones are offered admission again first.

    Returns the report, in state `resumed`, if at least one engine is confirmed at the new version; its `unconfirmed`
    names the retired ones. Raises PublicationError when none is. `readmit=False`: the caller has just offered it.
    """
    async with fleet.publishing, AsyncExitStack() as held:
        fleet.check_new(version)
        if readmit:
            await readmit_retired(fleet)
        # One list for prepare and for the transaction: who is admitted while the transport prepares has no part in what
        # is prepared, and waits for the next publication.
        members = fleet.updatable()
        await asyncio.gather(*(_identify(fleet, member) for member in members))
        report = PublicationReport(version, fleet.version, str(fleet.policy), transport.name, started_at=time.time())
        started = time.perf_counter()
        await transport.prepare(version, [m.client for m in members])
        report.prepare_ms = _ms(started)
        still = set(fleet.updatable())
        members = [m for m in members if m in still]
        held.enter_context(_held(fleet, members, version))
        targets = [_Target(m, EngineOutcome(m.name)) for m in members]
        report.engines = [t.outcome for t in targets]
        targets, refused = _without_refused(targets, transport)
        looked = await _on_all(targets, "look", _look(fleet))
        started = time.perf_counter()
        confirmed: list[_Target] = []
        why_not = "the publication was cancelled"
        try:
            confirmed = await _transact(looked, fleet.policy, transport, version, report)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
            raise
        finally:
            _retire_suspects(fleet, targets, confirmed, report, why_not)
            # A cancelled publication (Ctrl-C) must still resume what it paused.
            resumed, cancelled = await _to_its_end(_resume_all(fleet, targets, confirmed, version, started))
            report.wall_ms = _ms(started)
            _settle(fleet, targets, resumed, report, why_not)
            _retire_refused(fleet, refused, transport, report)
            if cancelled:
                raise asyncio.CancelledError
        if report.state == "failed":
            raise PublicationError(report)
        return report


async def _identify(fleet: Fleet, member: Member) -> None:
    """Notice a restart before the transport prepares for processes that are gone. What is wrong else, `look` finds."""
    with suppress(EngineError, FleetError, TimeoutError):
        async with asyncio.timeout(IDENTIFY_S):
            await recognise(fleet, member, await member.client.reports())


@contextmanager
def _held(fleet: Fleet, members: Sequence[Member], version: str) -> Iterator[None]:
    """Nobody but this publication retires these engines inside, and they may answer as `version`."""
    fleet.begin(version)
    for member in members:
        member.held = True
    try:
        yield
    finally:
        for member in members:
            member.held = False
        fleet.end()


def _without_refused(targets: Sequence[_Target], transport: Transport) -> tuple[list[_Target], list[_Target]]:
    """The engines that the transport can serve, and the others: what is sure to fail at the load costs no pause."""
    kept: list[_Target] = []
    refused: list[_Target] = []
    for target in targets:
        found = refused_by(transport, target.client)
        if found is None:
            kept.append(target)
            continue
        target.outcome.failed_step, target.outcome.reason = "prepare", found.why
        refused.append(target)
    return kept, refused


def _retire_refused(fleet: Fleet, refused: Sequence[_Target], transport: Transport, report: PublicationReport) -> None:
    """Where others go on, an engine that can't follow is left behind; one that may be stuck answers nobody anyway."""
    for target in refused:
        found = refused_by(transport, target.client)
        if report.state == "resumed" or (found is not None and found.unknown):
            fleet.retire(target.member, _blame(target.outcome, report, ""))


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage collection inside: all engines would stand still for as long as one takes in a trainer's process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def _transact(
    targets: Sequence[_Target], policy: Policy, transport: Transport, version: str, report: PublicationReport
) -> list[_Target]:
    """Pause, verify, load, label. Returns the engines confirmed at `version`."""

    async def load(target: _Target) -> None:
        target.touched = True
        await transport.load(target.client, version)

    async def label(target: _Target) -> None:
        await target.client.label(version)
        found = await target.client.weight_version()
        if found != version:
            raise NotConfirmed(target.member.name, f"its label reads {found!r}, not {version!r}")
        after = await target.client.reports()
        target.outcome.loads = [rank.loads for report in after for rank in report.ranks]
        reasons = why_not_updated(target.at_pause, after, counted=is_counted(transport))
        reasons += why_not_loaded(target.at_pause, after, policy)
        if policy.after_pause == "sweep":
            reasons += why_not_swept(target.before, after, policy)
        else:
            reasons += why_not_paused(target.before, after, policy)
        if reasons:
            raise NotConfirmed(target.member.name, "; ".join(dict.fromkeys(reasons)))
        if policy.after_pause == "sweep":
            target.outcome.sweep_verified = True
            target.outcome.tokens_swept = sum(r.kv.swept_tokens for r in after) - sum(
                r.kv.swept_tokens for r in target.before
            )

    started = time.perf_counter()
    with _garbage_kept():
        verified = await pause_generation_for_update(targets, policy)
    report.state = "verified"
    report.verified_ms = _ms(started)
    loaded = await _on_all(verified, "load", load)
    report.state = "loaded"
    # The label moves only here, after the last engine has loaded: no engine claims a version that isn't out yet.
    labelled = await _on_all(loaded, "label", label)
    report.state = "labelled"
    return labelled


def _retire_suspects(
    fleet: Fleet, targets: Sequence[_Target], confirmed: Sequence[_Target], report: PublicationReport, why_not: str
) -> None:
    """Retire the engines whose weights are unknown, before they resume.

    Afterwards would be too late: a request that reached such an engine in between could be answered by the new weights
    under the old label.
    """
    for target in targets:
        if target.touched and target not in confirmed:
            fleet.suspects |= {r.instance_id for r in target.before}
            fleet.retire(target.member, _blame(target.outcome, report, why_not))


def _blame(outcome: EngineOutcome, report: PublicationReport, why_not: str) -> str:
    """`why_not`: what ended the whole publication, for an engine that has no failure of its own."""
    outcome.failed_step = outcome.failed_step or report.state
    outcome.reason = outcome.reason or why_not
    return f"not confirmed at {report.version}: {outcome.failed_step}: {outcome.reason}"


async def _resume_all(
    fleet: Fleet, targets: Sequence[_Target], confirmed: Sequence[_Target], version: str, started: float
) -> list[_Target]:
    """Resume every engine, confirmed or not; return the confirmed ones that did resume."""

    async def resume(target: _Target) -> None:
        if target.touched and target not in confirmed:
            # Its weights are unknown: what it has in flight must not be finished under any version's name, and its
            # old label must not vouch for them when it is admitted again, by this controller or another.
            await _ignoring_engine_errors(target.client.abort_all())
            await _ignoring_engine_errors(target.client.label(f"unconfirmed-{version}"))
            if fleet.withdraw is not None:
                await fleet.withdraw(target.member)
        for attempt in range(RESUME_TRIES):
            try:
                await target.client.resume()
                answered = _ms(started)
                # Like a pause, a resume is passed on without an acknowledgement: 200 from a dead scheduler, too.
                reasons = why_not_running(target.before, await target.client.reports())
                if not reasons:
                    target.outcome.paused_ms = answered
                    return
                raise NotConfirmed(target.member.name, "; ".join(reasons))
            except EngineFault:  # a second resume is harmless, a paused engine isn't
                if attempt == RESUME_TRIES - 1:
                    raise

    already_failed = {id(t): (t.outcome.failed_step, t.outcome.reason) for t in targets if t.outcome.reason}
    resumed = await _on_all(targets, "resume", resume)
    for target in targets:
        if id(target) in already_failed:  # the first failure is the one that explains
            target.outcome.failed_step, target.outcome.reason = already_failed[id(target)]
    return [t for t in confirmed if t in resumed]


def _settle(
    fleet: Fleet, targets: Sequence[_Target], confirmed: Sequence[_Target], report: PublicationReport, why_not: str
) -> None:
    """Write the outcome into the fleet: who is at the new version, who is retired and why.

    Where no engine reached the new version, the fleet stays at the old one, and so do the engines whose weights were
    not touched and that resumed.
    """
    for target in targets:
        if target in confirmed:
            target.outcome.confirmed = True
            target.member.instances = instances_of(target.before)
            fleet.suspects -= {r.instance_id for r in target.before}
            continue
        why = _blame(target.outcome, report, why_not)
        if confirmed or target.touched or target.outcome.paused_ms is None:
            fleet.retire(target.member, why)
    if confirmed:
        report.state = "resumed"
        fleet.move_to(report.version, [t.member for t in confirmed])
    else:
        report.state = "failed"


async def _to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """The result of `work`, and whether this task was cancelled meanwhile, any number of times."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def _ignoring_engine_errors(call: Awaitable[None]) -> None:
    with suppress(EngineError):  # best effort on an engine that is already being retired
        await call


def _ms(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)
