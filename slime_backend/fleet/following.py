"""Engines that another controller publishes to: a gateway in front of a slime job's engines moves with them.

A publication moves an engine's label only after its own evidence, so a process that was confirmed here, runs on and
bears another name is at that version. A process that restarted, or that a failed publication left, is never followed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_backend.engine_client import EngineError
from slime_backend.fleet.liveness import Look, look
from slime_backend.fleet.membership import UNCONFIRMED, Fleet, Member, instances_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Moves:
    """What a fleet must know of its engines to move with them. One per fleet, called after each look at all of them."""

    fleet: Fleet
    _confirmed: dict[str, frozenset[str]] = field(default_factory=dict)  # engine -> its processes that were confirmed

    def __post_init__(self) -> None:
        self._note()

    async def follow(self, looks: Mapping[Member, Look]) -> None:
        """Move the fleet to the version that its confirmed processes were moved to, and confirm those that came later.

        Nothing happens during a publication of the fleet's own, nor where engines bear several new names.
        """
        self._note()
        known = [member for member, found in looks.items() if self._is_known(member, found)]
        labels = dict(zip(known, await asyncio.gather(*map(_label, known)), strict=True))
        # The name of a process that restarted between look and label isn't that of the process that was confirmed.
        counts = [m for m, label in labels.items() if label and (label != self.fleet.version or m.status == "joining")]
        for member, found in zip(counts, await asyncio.gather(*(look(m.client, looks=1) for m in counts)), strict=True):
            if not self._is_known(member, found):
                del labels[member]
        if self.fleet.publishing.locked():
            return
        here = {member: label for member, label in labels.items() if label and member.status != "retired"}
        moved = {member: label for member, label in here.items() if label != self.fleet.version}
        versions = set(moved.values())
        if len(versions) > 1:
            log.warning("engines were moved to several versions by somebody else: %s", ", ".join(sorted(versions)))
        elif versions:
            (version,) = versions
            log.warning("%s moved to version %r by another controller", ", ".join(m.name for m in moved), version)
            self.fleet.move_to(version, list(moved))
        for member, label in here.items():
            if label == self.fleet.version and member.status == "joining":
                self.fleet.confirm(member, label)

    def _note(self) -> None:
        for member in self.fleet.members.values():
            if member.status == "confirmed":
                self._confirmed[member.name] = member.instances

    def _is_known(self, member: Member, found: Look) -> bool:
        """Whether it is a process that was confirmed here, generates, and has no weights of a failed publication."""
        processes = instances_of(found.reports)
        return (
            bool(processes)
            and processes == self._confirmed.get(member.name)
            and not (member.held or processes & self.fleet.suspects)
            and not any(report.kv.paused for report in found.reports)
        )


async def _label(member: Member) -> str:
    """The version that it bears; empty where it can't be asked, or bears the name of a failed publication."""
    try:
        label = await member.client.weight_version()
    except EngineError:
        return ""
    return "" if label is None or label.startswith(UNCONFIRMED) else label
