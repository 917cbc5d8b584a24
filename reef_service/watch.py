"""Looks at every engine again and again: retires what no longer answers, takes out of routing what isn't the engine
that was confirmed, admits what has come back, moves with engines that another controller publishes to, and remembers
what the engines count, for the page and for /metrics."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_backend.fleet import Fleet, Member, readmit_retired
from slime_backend.fleet.following import Moves
from slime_backend.fleet.liveness import Look, compare, look
from slime_backend.provenance.records import RolloutRecord

MISSES = 3  # looks at an engine that is gone (liveness.py) until an engine is retired
HITS_OF = 256  # the last admissions that a hit rate is of


@dataclass(slots=True)
class Seen:
    """One engine, as it was seen last."""

    kv: list[dict[str, Any]] = field(default_factory=list)  # per rank, raw counts
    at: float = 0.0
    misses: int = 0
    hits: list[tuple[int, int]] = field(default_factory=list)  # (cached, total) of its last prefills


class Watch:
    def __init__(self, fleet: Fleet, every_s: float) -> None:
        self.fleet, self.every_s = fleet, every_s
        self.seen: dict[str, Seen] = {}
        self._moves = Moves(fleet)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            # Not during a publication: it has its own view of every engine, and a paused one isn't a dead one.
            if not self.fleet.publishing.locked():
                members = list(self.fleet.members.values())
                looks = await asyncio.gather(*(self._look(member) for member in members))
                await self._moves.follow(dict(zip(members, looks, strict=True)))
                if not self.fleet.publishing.locked():
                    await readmit_retired(self.fleet)

    def turn(self, record: RolloutRecord) -> None:
        seen = self.seen.setdefault(record.engine, Seen())
        seen.hits = [*seen.hits, *((p.cached, p.total) for p in record.prefills)][-HITS_OF:]

    def engines(self) -> list[dict[str, Any]]:
        """Every engine as JSON, for the page."""
        return [self._engine(m) for m in self.fleet.members.values()]

    async def _look(self, member: Member) -> Look:
        seen = self.seen.setdefault(member.name, Seen())
        found = await look(member.client, looks=1)
        if found.reports:
            seen.kv, seen.at = [asdict(r.kv) for r in found.reports], time.time()
        if found.life != "unseen":  # of what couldn't be asked nothing is known
            seen.misses = seen.misses + 1 if found.life == "gone" else 0
        if member.held or member.status == "retired":
            return found
        if seen.misses >= MISSES:
            self.fleet.retire(member, f"it doesn't answer: {found.seen}", ended=found.ended)
        elif found.life == "alive":
            await compare(self.fleet, member, found)
        return found

    def _engine(self, member: Member) -> dict[str, Any]:
        seen = self.seen.get(member.name, Seen())
        total = sum(t for _, t in seen.hits)
        free, capacity = (sum(kv[name] for kv in seen.kv) for name in ("full_free", "full_capacity"))
        return {
            "name": member.name,
            "url": member.client.url,
            "status": member.status,
            "version": member.version,
            "reason": member.reason,
            "in_flight": member.in_flight,
            "kv_free": free,
            "kv_capacity": capacity,
            "running": sum(kv["running"] for kv in seen.kv),
            "paused": any(kv["paused"] for kv in seen.kv),
            "hit_rate": sum(c for c, _ in seen.hits) / total if total else None,
            "seen_at": seen.at,
        }
