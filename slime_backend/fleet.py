"""Which engines exist, which weight version each one is confirmed at, and which may answer requests.

    joining --confirmed at the fleet's version--> confirmed --a publication it isn't part of or fails--> retired
    retired --admitted again (a restarted or recovered engine)--> joining

Only a confirmed engine is routed to. Decisions here are plain state changes without I/O; `admit` is the one function
that asks an engine, because what an engine was started with must be read back from the engine itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_backend.engine_client import EngineClient
from slime_backend.kv_holders import unhandled
from slime_backend.policy import Policy, check_radix_setting
from slime_backend.wire import ACTIVE, SchedulerReport

Status = Literal["joining", "confirmed", "retired"]


MOST_NAMES = 10_000  # of earlier versions that are remembered; a run counts upwards


class FleetError(RuntimeError):
    """The fleet can't do what was asked; the message names the engine and the way out."""


class VersionTaken(FleetError):
    """A name that stands for other weights already."""


class EngineUnfit(FleetError):
    """A live engine's own report doesn't fit the policy."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine as the fleet knows it."""

    client: EngineClient
    status: Status = "joining"
    version: str | None = None  # the version that it was last confirmed at
    reason: str = ""  # why it was retired
    hooks: frozenset[str] = frozenset()  # active on every rank when it was admitted
    in_flight: int = 0  # requests that the dispatcher has sent and not yet got back
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set for good once it is retired

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
    # Two publications at once would interleave their pauses and loads.
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _used: dict[str, None] = field(default_factory=dict)  # names of the versions before, the last MOST_NAMES of them

    def check_new(self, version: str) -> None:
        """Raise VersionTaken unless `version` is a new name: a token's record names its weights by it, so that other
        weights under the same name could never be told from them."""
        if not version.strip():
            raise VersionTaken("a version needs a name")
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

    def confirm(self, member: Member, version: str) -> None:
        member.status, member.version, member.reason = "confirmed", version, ""
        self._notify()

    def retire(self, member: Member, reason: str) -> None:
        """Take an engine out of routing; it stays listed with the reason until it is admitted again."""
        member.status, member.reason = "retired", reason
        member.gone.set()
        self._notify()

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
            f"engine {name}: {holder.name}: {holder.why}; {holder.way_out}, or allow it by name and let the audit check"
        )
    for rank, report in enumerate(reports):
        missing = report.missing_hooks(policy.needed_hooks)
        if missing:
            listed = ", ".join(f"{hook} ({why})" for hook, why in missing.items())
            raise EngineUnfit(
                f"engine {name}, rank {rank}: the policy '{policy}' needs hooks that aren't active: {listed}; start "
                f"the engine with REEF_SLIME_HOOKS={','.join(policy.needed_hooks)}"
            )


async def admit(fleet: Fleet, client: EngineClient) -> Member:
    """Check a live engine against the policy and add it: confirmed at once if it already serves the fleet's version,
    joining (not routed) until the next publication reaches it otherwise.

    Raises EngineUnfit, or EngineError where it doesn't answer.
    """
    info = await client.server_info()
    reports = await client.reports(info)
    check_fit(client.name, info, reports, fleet.policy, fleet.allow)
    active = [{name for name, status in report.hooks.items() if status == ACTIVE} for report in reports]
    label = await client.weight_version()
    # Nothing is awaited from here on: an engine is added whole or not at all, and at the version of this moment.
    member = Member(client, hooks=frozenset(set.intersection(*active)))
    fleet.add(member)
    # A paused engine is in somebody's publication, or its publisher died in one: its label says nothing yet.
    trusted = not any(r.kv.paused or r.instance_id in fleet.suspects for r in reports)
    if trusted and label == fleet.version:
        fleet.confirm(member, fleet.version)
    return member
