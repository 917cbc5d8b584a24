"""Which engines exist, which weight version each one is confirmed at, and which may answer requests.

    joining --confirmed at the fleet's version--> confirmed --a publication it isn't part of or fails--> retired
    retired --admitted again (a restarted or recovered engine)--> joining
    confirmed --another process at its address, or another version in its answers--> joining

Only a confirmed engine is routed to. What is confirmed is a set of scheduler processes, not an address: their instance
ids are kept, and other ids at the same address are another engine. Decisions here are plain state changes without I/O;
`admit` and `recognise` are the functions that ask an engine, because what an engine was started with must be read back
from the engine itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.errors import ReefError, UsageError
from slime_backend.evidence import named_ranks, why_ranks_missing
from slime_backend.fleet.kv_holders import unhandled
from slime_backend.fleet.quarantine import End, Quarantine
from slime_backend.fleet.weights import WeightRecords
from slime_backend.policy import Policy, check_radix_setting
from slime_backend.wire import ACTIVE, SchedulerReport

log = logging.getLogger(__name__)
Status = Literal["joining", "confirmed", "retired"]
MOST_VERSIONS = 256  # publications that one request may live through and still be answered
_AGAIN = " (not admitted again: "
READMIT_S = 5.0  # for each retired engine, all at once: a publication waits for it


MOST_NAMES = 10_000  # of earlier versions that are remembered; a run counts upwards
UNCONFIRMED = "unconfirmed-"  # begins the label of an engine whose weights a failed publication may have changed


class FleetError(ReefError, RuntimeError):
    """The fleet can't do what was asked; the message names the engine and the way out."""


class VersionTaken(FleetError):
    """A name that stands for other weights already."""


class VersionUnnamed(UsageError, VersionTaken):
    """Weights can't be published without a name."""


class EngineUnfit(FleetError):
    """A live engine's own report doesn't fit the policy."""


class Confirmation(asyncio.Event):
    """Set once what was confirmed is so no longer. `end`: because the engine's process has ended."""

    end: End | None = None


@dataclass(slots=True, eq=False)
class Member:
    """One engine as the fleet knows it."""

    client: EngineClient
    status: Status = "joining"
    version: str | None = None  # the version that it was last confirmed at
    reason: str = ""  # why it was retired
    hooks: frozenset[str] = frozenset()  # active on every rank when it was admitted
    instances: frozenset[str] = frozenset()  # of the scheduler processes that were admitted or confirmed last
    dtype: str = ""  # that it was started with, by SGLang's name; "auto" is its checkpoint's
    in_flight: int = 0  # requests that the dispatcher has sent and not yet got back
    held: bool = False  # a publication has it between look and resume: that transaction alone retires it
    # Set once what was confirmed is so no longer; a confirmation replaces it. A request keeps the one that it was sent
    # under, so that it can't take a later confirmation for its own.
    gone: Confirmation = field(default_factory=Confirmation)

    @property
    def name(self) -> str:
        return self.client.name


@dataclass(slots=True)
class Fleet:
    """The engines of one publishing group; one per trainer, used inside one event loop."""

    policy: Policy
    version: str
    allow: frozenset[str] = frozenset()  # names of kv_holders that the user answers for
    members: dict[str, Member] = field(default_factory=dict)
    # Scheduler processes whose weights a failed publication may have changed: their label proves nothing.
    suspects: set[str] = field(default_factory=set)
    # Where somebody else routes (slime's router): takes an engine out there. A publication awaits it before it resumes
    # an engine with unknown weights. Must not raise.
    withdraw: Callable[[Member], Awaitable[None]] | None = None
    wait_s: float = 60.0  # how long a request waits while no engine can take it
    quarantine: Quarantine = field(default_factory=Quarantine)
    weights: WeightRecords = field(default_factory=WeightRecords)
    # Two publications at once would interleave their pauses and loads.
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    returning: asyncio.Future[None] | None = None  # an offer of admission to the retired ones, under way
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    next_version: str | None = None  # the one that is being published
    _begun: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_VERSIONS))  # versions of the last publications
    _begun_count: int = 0
    _used: dict[str, None] = field(default_factory=dict)  # names of the versions before, the last MOST_NAMES of them

    def check_new(self, version: str) -> None:
        """Raise VersionTaken unless `version` is a new name: a token's record names its weights by it, so that other
        weights under the same name could never be distinguished from them."""
        check_named(version)
        if version == self.version or version in self._used:
            state = "in force" if version == self.version else "an earlier one"
            raise VersionTaken(
                f"version {version!r} is taken: it is {state}, and a name stands for one set of weights; publish under "
                "a name that wasn't used"
            )

    def add(self, member: Member) -> None:
        known = self.members.get(member.name)
        if known is not None and known.status != "retired":
            raise FleetError(f"{member.name} is already in the fleet ({known.status}); retire it first")
        self.members[member.name] = member

    def forget(self, member: Member) -> None:
        """Drop an engine that is gone for good."""
        self.members.pop(member.name, None)
        member.gone.set()
        self._notify()

    def confirm(self, member: Member, version: str, instances: Iterable[str] | None = None) -> None:
        """`instances`: of the scheduler processes that showed it; without, those that are known."""
        member.status, member.version, member.reason = "confirmed", version, ""
        if instances is not None:
            member.instances = frozenset(instances)
        if member.gone.is_set():
            member.gone = Confirmation()
        self._notify()

    def retire(self, member: Member, reason: str, *, ended: bool = False) -> None:
        """Take an engine out of routing; it stays listed with the reason until it is admitted again. `ended`: its
        process has, so that what was in flight may be why."""
        if member.status != "retired":
            log.warning("%s is retired: %s", member.name, reason)
        member.status, member.reason = "retired", reason
        # Only of a confirmation that still held: what was retired for another reason didn't end by its requests.
        if ended and not member.gone.is_set():
            member.gone.end = End()
        member.gone.set()
        self._notify()

    def demote(self, member: Member, reason: str) -> None:
        """Take an engine out of routing that isn't what was confirmed; the next publication takes it along."""
        if member.status == "retired":
            return
        log.warning("%s is taken out of routing: %s", member.name, reason)
        member.status, member.version, member.reason = "joining", None, reason
        member.gone.set()
        self._notify()

    def begin(self, version: str) -> None:
        """A publication of `version` begins: until `end` an engine may answer under that name as well."""
        self.next_version = version
        self._begun.append(version)
        self._begun_count += 1

    def end(self) -> None:
        self.next_version = None

    def mark(self) -> tuple[str, int]:
        """The moment at which a request is sent, for `versions_since`."""
        return self.version, self._begun_count - (self.next_version is not None)

    def versions_since(self, mark: tuple[str, int]) -> set[str]:
        """The versions under which a request may be answered that was sent at `mark`: the fleet's then and now, and all
        whose publication was under way in between."""
        version, count = mark
        since = min(self._begun_count - count, len(self._begun))
        return {version, self.version, *list(self._begun)[len(self._begun) - since :]}

    def move_to(self, version: str, confirmed: list[Member]) -> None:
        """After a publication: the fleet is at `version`; a member that isn't confirmed at it must not be routed."""
        self._used.pop(self.version, None)
        self._used[self.version] = None
        while len(self._used) > MOST_NAMES:
            del self._used[next(iter(self._used))]
        self.version = version
        for member in confirmed:
            self.confirm(member, version)
        for member in self.members.values():
            if member.status == "confirmed" and member.version != version:
                member.status = "joining"
        self._notify()

    def has_hook(self, name: str) -> bool:
        """Whether some member runs the plugin's hook `name`, not counting an SGLang that does without it."""
        return any(name in member.hooks for member in self.members.values())

    def routable(self) -> list[Member]:
        return [m for m in self.members.values() if m.status == "confirmed" and m.version == self.version]

    def updatable(self) -> list[Member]:
        """The members that the next publication must reach."""
        return [m for m in self.members.values() if m.status != "retired"]

    def retired(self) -> Mapping[str, str]:
        return {m.name: m.reason for m in self.members.values() if m.status == "retired"}

    @contextmanager
    def routed(self, choose: Callable[[list[Member]], Member] | None = None) -> Iterator[Member]:
        """The confirmed engine with the fewest requests in flight, or the one that `choose` picks of the confirmed;
        counted while the block runs.

        Raises FleetError where no engine is confirmed at the fleet's version.
        """
        candidates = self.routable()
        if not candidates:
            named = "; ".join(f"{m.name} {m.status} {m.reason}".rstrip() for m in self.members.values()) or "no engines"
            raise FleetError(f"no engine is confirmed at version {self.version}: {named}")
        member = min(candidates, key=lambda m: m.in_flight) if choose is None else choose(candidates)
        member.in_flight += 1
        try:
            yield member
        finally:
            member.in_flight -= 1

    async def wait_changed(self, timeout_s: float) -> None:
        """Return at the next change of any member's status, or after `timeout_s`."""
        event = self._changed
        # Not asyncio.wait_for: on Python 3.11 it swallows a cancellation that arrives together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def check_named(version: str) -> None:
    """Raise VersionUnnamed for a version without a name."""
    if not version.strip():
        raise VersionUnnamed("a version needs a name")


def check_fit(
    name: str,
    info: Mapping[str, Any],
    reports: list[SchedulerReport],
    policy: Policy,
    allow: frozenset[str] = frozenset(),
) -> None:
    """Raise EngineUnfit where a live engine's own report contradicts the policy.

    slime applies per-group overrides last, so what an engine was asked to be proves nothing.
    """
    radix_on = not bool(info.get("disable_radix_cache", False))
    try:
        check_radix_setting(policy, radix_on, f"engine {name}'s own report (disable_radix_cache=false)")
    except ValueError as error:
        raise EngineUnfit(str(error)) from error
    for holder in unhandled(info, allow):
        raise EngineUnfit(
            f"engine {name}: {holder.name}: {holder.why}; {holder.way_out}, or allow it (--allow-kv-holder "
            f"{holder.name}) and let the audit check"
        )
    silent = why_ranks_missing(reports)
    if silent:
        raise EngineUnfit(f"engine {name}: {'; '.join(silent)}")
    for rank, report in named_ranks(reports):
        missing = report.missing_hooks(policy.needed_hooks)
        if missing:
            listed = ", ".join(f"{hook} ({why})" for hook, why in missing.items())
            raise EngineUnfit(
                f"engine {name}, {rank}: the policy '{policy}' needs hooks that aren't active: {listed}; start "
                f"the engine with REEF_SLIME_HOOKS={','.join(policy.needed_hooks)}"
            )
    for number, report in enumerate(reports):
        for other in report.tensor_ranks:
            _check_same_hooks(f"engine {name}, rank {number}, tensor rank {other.tensor_rank}", report, other)


def _check_same_hooks(where: str, first: SchedulerReport, other: SchedulerReport) -> None:
    """Raise EngineUnfit unless both tensor ranks run the same hooks: a hook that changes cache keys on one alone would
    have the ranks compute prefixes of different lengths.
    """
    names = sorted(first.hooks.keys() | other.hooks.keys())
    found = {name: [report.hooks.get(name, "not loaded") for report in (other, first)] for name in names}
    differing = [f"{name} ({here}; {there} on tensor rank 0)" for name, (here, there) in found.items() if here != there]
    if differing:
        raise EngineUnfit(
            f"{where}: its hooks aren't those of tensor rank 0: {', '.join(differing)}; start every node's processes "
            "with the same REEF_SLIME_HOOKS and the same reef-slime"
        )


async def admit(fleet: Fleet, client: EngineClient) -> Member:
    """Check a live engine against the policy and add it: confirmed at once if it already serves the fleet's version,
    joining (not routed) until the next publication reaches it otherwise.

    Raises EngineUnfit, or EngineError where it doesn't answer.
    """
    info = await client.server_info()
    reports = await client.reports(info)
    check_fit(client.name, info, reports, fleet.policy, fleet.allow)
    label = await client.weight_version()
    # Nothing is awaited from here on: an engine is added whole or not at all, and at the version of this moment.
    member = Member(
        client, hooks=_active_hooks(reports), instances=instances_of(reports), dtype=str(info.get("dtype") or "")
    )
    fleet.add(member)
    # A paused engine is in somebody's publication, or its publisher died in one: its label says nothing yet.
    trusted = not any(r.kv.paused or r.instance_id in fleet.suspects for r in reports)
    if trusted and label == fleet.version:
        fleet.confirm(member, fleet.version)
    return member


async def recognise(fleet: Fleet, member: Member, reports: Sequence[SchedulerReport]) -> None:
    """Compare who reports with who was confirmed. Another process is another engine: it isn't routed until a
    publication has confirmed it, and it is checked against the policy as at an admission. The same process is checked
    for hooks that failed since.

    Raises EngineUnfit, or EngineError where it doesn't answer; it isn't routed then, either.
    """
    found = instances_of(reports)
    if found == member.instances:
        _check_hooks_go_on(member, reports)
        return
    if member.instances:
        fleet.demote(member, "it restarted: another process answers at its address")
        if fleet.withdraw is not None:
            await fleet.withdraw(member)
    check_fit(member.name, await member.client.server_info(), list(reports), fleet.policy, fleet.allow)
    member.hooks, member.instances = _active_hooks(reports), found


def _check_hooks_go_on(member: Member, reports: Sequence[SchedulerReport]) -> None:
    """Raise EngineUnfit where a hook that was active at the admission has failed since: nobody knows what it missed."""
    for rank, report in named_ranks(reports):
        for hook in sorted(member.hooks & report.failed_hooks.keys()):
            why = report.failed_hooks[hook]
            raise EngineUnfit(
                f"engine {member.name}, {rank}: its hook {hook} {why}; what it did not see since can't be known, so "
                "restart the engine"
            )


async def readmit_retired(fleet: Fleet, deadline_s: float = READMIT_S) -> None:
    """Offer admission again to every retired engine; who isn't admitted stays retired, with the reason.

    One that comes back is confirmed at once only if it serves the fleet's version and no failed publication has
    touched it (`admit`); otherwise the next publication takes it along.
    """
    retired = [member for member in fleet.members.values() if member.status == "retired"]
    await asyncio.gather(*(_readmit(fleet, member, deadline_s) for member in retired))


async def offer_return(fleet: Fleet) -> None:
    """As `readmit_retired`, once for all who ask at the same time."""
    if fleet.returning is None or fleet.returning.done():
        fleet.returning = asyncio.ensure_future(readmit_retired(fleet))
    await asyncio.shield(fleet.returning)


async def _readmit(fleet: Fleet, member: Member, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await admit(fleet, member.client)
    except (FleetError, EngineError, TimeoutError) as error:
        why = str(error) or f"no answer within {deadline_s:g} s"
        member.reason = f"{member.reason.split(_AGAIN)[0]}{_AGAIN}{why})"
    else:
        log.warning("%s is back and was admitted again", member.name)


def instances_of(reports: Iterable[SchedulerReport]) -> frozenset[str]:
    return frozenset(report.instance_id for report in reports)


def _active_hooks(reports: Sequence[SchedulerReport]) -> frozenset[str]:
    """Hooks that are active on every rank."""
    active = [{name for name, status in report.hooks.items() if status == ACTIVE} for report in reports]
    return frozenset(set.intersection(*active))
