"""The publication transaction: move every updatable engine from one weight version to the next, verified.

    step             what happens                                                                      state
    prepare          the transport makes the bytes ready; the engines still generate                   open
    look             each scheduler's counts are read, to compare with; still generating
    pause            every engine is paused at once                                                    paused
    flush or verify  the cache is flushed after a retracting pause, else nothing is sent; each
                     data-parallel rank's own counts must show the pause, and the flush in it          verified
    load             the transport moves the bytes; no label yet. Scoped entries are swept as it
                     begins                                                                            loaded
    weights          each rank's digests of its tensors are held against what was sent, and against
                     those of the other engines (weights.py)                                           weights
                                                                                                       verified
    label            once every surviving engine has shown it: the version is named, and read back
                     with the evidence of load and sweep                                               labelled
    resume           always, in `finally`, also after an unknown outcome; the counts must show it      resumed

Anything but a positive confirmation counts as a refusal: the engine takes no part in the next step. An engine that
isn't confirmed at the new version is retired from routing and named; the others go on. All steps run on all engines at
once and have deadlines; a step begins when the slowest engine has ended the one before. `Publication.run` reads as this
table does; where no engine is confirmed, the state ends as `failed`. What the counts must show: evidence.py; how long a
flush is tried: pause.py; what is reported: report.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slime_backend.errors import EngineFault
from slime_backend.evidence import why_not_loaded, why_not_paused, why_not_running, why_not_swept, why_not_updated
from slime_backend.fleet import Fleet, Member, readmit_retired
from slime_backend.fleet.membership import UNCONFIRMED, instances_of, recognise
from slime_backend.publication import pause
from slime_backend.publication.guards import garbage_kept, held, identify, ignoring_engine_errors, to_its_end
from slime_backend.publication.report import (
    EngineOutcome,
    NotConfirmed,
    PublicationError,
    PublicationReport,
    State,
    Step,
)
from slime_backend.publication.targets import Target, ms_since, on_all
from slime_backend.publication.weights import WeightCheck
from slime_backend.transports import Transport, expect_loads, is_counted, refused_by
from slime_backend.wire import SchedulerReport

RESUME_TRIES = 3
REACHED: dict[Step, State] = {  # by a step, once no engine is in it any more
    "pause": "paused",
    "flush": "verified",
    "verify": "verified",
    "load": "loaded",
    "weights": "weights verified",
    "label": "labelled",
}


@dataclass(slots=True, eq=False, kw_only=True)
class _Target(Target):
    member: Member
    touched: bool = False  # its weights may have changed


async def publish(fleet: Fleet, transport: Transport, version: str, *, readmit: bool = True) -> PublicationReport:
    """Publish `version` to every updatable engine of the fleet; retired ones are offered admission again first.

    Returns the report, in state `resumed`, if at least one engine is confirmed at the new version; its `unconfirmed`
    names the retired ones. Raises PublicationError when none is. `readmit=False`: the caller has just offered it.
    """
    return await Publication(fleet, transport, version, readmit).run()


class Publication:
    """One publication; `run` it once. `report.state` and `step` can be read while it is under way."""

    def __init__(self, fleet: Fleet, transport: Transport, version: str, readmit: bool = True) -> None:
        self.fleet, self.transport, self.version = fleet, transport, version
        self.policy = fleet.policy
        self.report = PublicationReport(version, fleet.version, fleet.policy, transport.name)
        self.step: Step = "prepare"
        self._weights = WeightCheck(fleet.weights, transport)
        self._readmit = readmit
        self._targets: list[_Target] = []  # what is resumed at the end
        self._refused: list[_Target] = []  # that the transport can't serve
        self._confirmed: list[_Target] = []  # labelled as the new version; after the resume, those that also resumed
        self._started = 0.0  # the first pause, of time.perf_counter()

    async def run(self) -> PublicationReport:
        """As `publish`."""
        async with self.fleet.publishing:
            members = await self._prepare()
            with held(self.fleet, members, self.version):
                self._choose(members)
                await self._update(await self._look())
        if self.report.state == "failed":
            raise PublicationError(self.report)
        return self.report

    async def _update(self, looked: Sequence[_Target]) -> None:
        """Everything between the first pause and the last resume. Every engine is resumed, whatever happens."""
        self._started = time.perf_counter()
        ended_by = "the publication was cancelled"
        try:
            with garbage_kept():
                verified = await self._verify(await self._pause(looked))
            self.report.verified_ms = ms_since(self._started)
            loaded = await self._verify_weights(await self._load(verified))
            # The label moves only here, after the last engine has loaded: none claims a version that isn't out yet.
            self._confirmed = await self._label(loaded)
        except Exception as error:
            ended_by = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._blame_rest(ended_by)
            self._retire_unknown()
            # A cancelled publication (Ctrl-C) must still resume what it paused.
            self._confirmed, cancelled = await to_its_end(self._resume())
            self.report.wall_ms = ms_since(self._started)
            self._settle()
            if cancelled:
                raise asyncio.CancelledError

    # ---- the steps ----------------------------------------------------------------------------------------------

    async def _prepare(self) -> list[Member]:
        """One list for prepare and for all that follows: who is admitted while the transport prepares has no part in
        what is prepared, and waits for the next publication."""
        self.fleet.check_new(self.version)
        if self._readmit:
            await readmit_retired(self.fleet)
        members = self.fleet.updatable()
        await asyncio.gather(*(identify(self.fleet, member) for member in members))
        self.report.previous_version, self.report.started_at = self.fleet.version, time.time()
        started = time.perf_counter()
        await self._weights.meet(members, self.fleet.version)
        await self.transport.prepare(self.version, [m.client for m in members])
        self.report.prepare_ms = ms_since(started)
        still = set(self.fleet.updatable())
        return [m for m in members if m in still]

    def _choose(self, members: Sequence[Member]) -> None:
        """The engines that the transport can serve: what is sure to fail at the load costs no pause."""
        for member in members:
            target = _Target(member.client, EngineOutcome(member.name, dtype=member.dtype), member=member)
            self.report.engines.append(target.outcome)
            refusal = refused_by(self.transport, target.client)
            if refusal is None:
                self._targets.append(target)
            else:
                target.fail("prepare", refusal.why)
                self._refused.append(target)

    async def _look(self) -> list[_Target]:
        async def look(target: _Target) -> None:
            await pause.look(target)
            await recognise(self.fleet, target.member, target.before)

        return await self._on_all(self._targets, "look", look)

    async def _pause(self, targets: Sequence[_Target]) -> list[_Target]:
        return await self._on_all(targets, "pause", partial(pause.send_pause, policy=self.policy))

    async def _verify(self, targets: Sequence[_Target]) -> list[_Target]:
        """Behind a barrier: no engine has lost its cache while another still refuses to pause."""
        step = pause.verifying_step(self.policy)
        return await self._on_all(targets, step, partial(pause.verify_pause, policy=self.policy))

    async def _load(self, targets: Sequence[_Target]) -> list[_Target]:
        async def load(target: _Target) -> None:
            target.touched = True
            await self.transport.load(target.client, self.version)

        expect_loads(self.transport, [t.client for t in targets])
        return await self._on_all(targets, "load", load)

    async def _verify_weights(self, targets: Sequence[_Target]) -> list[_Target]:
        """Behind a barrier: what one engine has is held against what all have."""
        if self._weights.off:
            return list(targets)
        looked = await self._on_all(targets, "weights", self._weights.look)
        await self._weights.judge(looked)
        for target in looked:
            if target.weights_wrong:
                target.fail("weights", "; ".join(target.weights_wrong))
        return [target for target in looked if not target.weights_wrong]

    async def _label(self, targets: Sequence[_Target]) -> list[_Target]:
        async def label(target: _Target) -> None:
            await target.client.label(self.version)
            found = await target.client.weight_version()
            if found != self.version:
                raise NotConfirmed(target.name, f"its label reads {found!r}, not {self.version!r}")
            self._confirm(target, await target.client.reports())

        return await self._on_all(targets, "label", label)

    def _confirm(self, target: _Target, after: list[SchedulerReport]) -> None:
        """Raise NotConfirmed unless the counts show that every rank has the new weights, and nothing of older ones."""
        target.outcome.loads = [rank.loads for report in after for rank in report.ranks]
        reasons = why_not_updated(target.at_pause, after, counted=is_counted(self.transport))
        reasons += why_not_loaded(target.at_pause, after, self.policy)
        sweeps = self.policy.after_pause == "sweep"
        reasons += (why_not_swept if sweeps else why_not_paused)(target.before, after, self.policy)
        if reasons:
            raise NotConfirmed(target.name, "; ".join(dict.fromkeys(reasons)))
        if sweeps:
            target.outcome.sweep_verified = True
            target.outcome.tokens_swept = _swept(after) - _swept(target.before)

    async def _resume(self) -> list[_Target]:
        """Resume every engine, confirmed or not; return the confirmed ones that did resume."""

        async def resume(target: _Target) -> None:
            if self._is_unknown(target):
                await self._disown(target)
            for attempt in range(RESUME_TRIES):
                try:
                    await self._resume_once(target)
                    return
                except EngineFault:  # a second resume is harmless, a paused engine isn't
                    if attempt == RESUME_TRIES - 1:
                        raise

        resumed = await self._on_all(self._targets, "resume", resume)
        return [t for t in self._confirmed if t in resumed]

    async def _resume_once(self, target: _Target) -> None:
        await target.client.resume()
        answered = ms_since(self._started)
        # Like a pause, a resume is passed on without an acknowledgement: 200 from a dead scheduler, too.
        if reasons := why_not_running(target.before, await target.client.reports()):
            raise NotConfirmed(target.name, "; ".join(reasons))
        target.outcome.paused_ms = answered

    async def _on_all(
        self, targets: Sequence[_Target], step: Step, action: Callable[[_Target], Awaitable[None]]
    ) -> list[_Target]:
        self.step = step
        kept = await on_all(targets, step, action)
        self.report.state = REACHED.get(step, self.report.state)
        return kept

    # ---- what becomes of each engine ----------------------------------------------------------------------------

    def _blame_rest(self, why: str) -> None:
        """What ended the whole publication is the reason of every engine that has no failure of its own."""
        for target in self._targets:
            if target not in self._confirmed and not target.outcome.failed_step:
                target.fail(self.step, why)

    def _is_unknown(self, target: _Target) -> bool:
        """Whether nobody knows which weights it has."""
        return target.touched and target not in self._confirmed

    def _retire_unknown(self) -> None:
        """Retire the engines whose weights are unknown, before they resume.

        Afterwards would be too late: a request that reached such an engine in between could be answered by the new
        weights under the old label.
        """
        for target in filter(self._is_unknown, self._targets):
            self.fleet.suspects |= {r.instance_id for r in target.before}
            self._retire(target)

    async def _disown(self, target: _Target) -> None:
        """What an engine of unknown weights has in flight must not be finished under any version's name, and its old
        label must not vouch for them when it is admitted again, by this controller or another."""
        await ignoring_engine_errors(target.client.abort_all())
        await ignoring_engine_errors(target.client.label(f"{UNCONFIRMED}{self.version}"))
        if self.fleet.withdraw is not None:
            await self.fleet.withdraw(target.member)

    def _settle(self) -> None:
        """Write the outcome into the fleet: who is at the new version, who is retired and why.

        Where no engine reached the new version, the fleet stays at the old one, and so do the engines whose weights
        were not touched and that resumed. One that the transport can't serve is left behind where others go on; where
        it may be stuck it answers nobody anyway.
        """
        for target in self._targets:
            if target in self._confirmed:
                target.outcome.confirmed = True
                target.member.instances = instances_of(target.before)
                self.fleet.suspects -= {r.instance_id for r in target.before}
            elif self._confirmed or target.touched or target.outcome.paused_ms is None:
                self._retire(target)
            else:
                target.outcome.stayed = True
        if self._confirmed:
            self.report.state = "resumed"
            self.report.digests = self._weights.keep(self._confirmed, self.version)
            self.fleet.move_to(self.version, [t.member for t in self._confirmed])
        else:
            self.report.state = "failed"
        for target in self._refused:
            refusal = refused_by(self.transport, target.client)
            if self._confirmed or (refusal is not None and refusal.unknown):
                self._retire(target)
            else:
                target.outcome.stayed = True

    def _retire(self, target: _Target) -> None:
        outcome = target.outcome
        self.fleet.retire(target.member, f"not confirmed at {self.version}: {outcome.failed_step}: {outcome.reason}")


def _swept(reports: Sequence[SchedulerReport]) -> int:
    return sum(report.kv.swept_tokens for report in reports)
