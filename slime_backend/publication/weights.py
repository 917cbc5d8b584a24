"""Whether every engine has the weights that were sent, by the digests that its own ranks make of them.

An engine that answers a load with success may have kept old tensors. Between load and label each rank is asked for a
digest of every tensor (engine_client/weight_digests.py), which is held against

    what was sent    where the engine had this tensor as it was sent once before, byte for byte
    what changed     where the source's digests of both versions are known: what it changed has changed, nothing else
    the others       engines and data-parallel ranks that had the same bytes before have the same bytes now

Nothing is demanded that wasn't once seen to hold for this engine, so a layout that SGLang converts raises no alarm;
what can't be compared is counted. `sample` looks at another part of the tensors each time, by a hash of their names;
`auto` at all of them where that takes at most AUTO_MS, else at as large a part as fits into it.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.engine_client.weight_digests import RankDigests
from slime_backend.fleet import Member
from slime_backend.fleet.weights import ServedWeights, WeightRecords
from slime_backend.publication.targets import Target, ms_since
from slime_backend.transports import Transport, digests_of, expect_digests
from slime_backend.transports.served import ServedModels
from slime_backend.weight_sources.digests import of_checkpoint, parts_of

AUTO_MS = 100.0
# What `auto` digests of a source: a second or two while the engines generate, a tenth of one while they are paused.
AUTO_AHEAD_BYTES, AUTO_PAUSED_BYTES = 2 << 30, 64 << 20
MEET_S = 30.0  # for an engine's first digests, while it generates
SAMPLED_PARTS = 8  # of `sample`, at least
NAMED = 3  # tensors in a reason
KEPT = "kept its old bytes"
Sent = Mapping[str, Sequence[str]]


class Tensor(NamedTuple):
    """One tensor of one rank: its digest after the load, the last known one, and that of the version before."""

    rank: int
    name: str
    now: str
    known: str | None
    before: str | None  # None where it wasn't looked at in that version

    @property
    def key(self) -> tuple[int, str]:
        return self.rank, self.name


@dataclass(slots=True)
class Look:
    """One engine's digests before and after the load, and what they show."""

    served: ServedWeights
    now: Sequence[RankDigests]
    current: bool = True  # it was confirmed at the version that was in force
    shown: set[tuple[int, str]] = field(default_factory=set)  # (rank, tensor) that is as it was sent
    copied: set[tuple[int, str]] = field(default_factory=set)  # that is as its copies are
    wrong: dict[str, str] = field(default_factory=dict)  # tensor, with its rank -> what it has

    def tensors(self) -> Iterator[Tensor]:
        for number, (rank, then) in enumerate(zip(self.now, self.served.ranks, strict=True)):
            for name, digest in rank.digests.items():
                known = then.digests.get(name)
                yield Tensor(number, name, digest, known, None if name in self.served.unseen else known)

    def is_comparable(self, tensor: Tensor, sent: Sent) -> bool:
        """Whether the engine had this tensor as it was sent, when it was sent in the dtype that it is sent in now."""
        known = self.served.comparable[tensor.rank].get(tensor.name)
        return known is not None and known == sent.get(tensor.name, ("",))[0]

    @property
    def looked_at(self) -> int:
        return sum(len(rank.digests) for rank in self.now)

    @property
    def verified(self) -> int:
        """How many tensors are shown to be right. Copies prove nothing where all have stayed as they were."""
        changed = any(t.before is not None and t.now != t.before for t in self.tensors())
        return len(self.shown | self.copied if changed else self.shown)

    def blame(self, tensor: Tensor, why: str) -> None:
        place = f" of {self.now[tensor.rank]}" if len(self.now) > 1 else ""
        self.wrong.setdefault(f"{tensor.name}{place}", why)

    def why_wrong(self) -> list[str]:
        """One reason for each kind of fault, with the tensors that have it."""
        by_fault: dict[str, list[str]] = defaultdict(list)
        for name, why in self.wrong.items():
            by_fault[why].append(name)
        return [f"{_listed(names)} {why}" for why, names in by_fault.items()]


def judge(looks: Mapping[str, Look], sent: Sent | None, sent_before: Sent | None) -> None:
    """Write into each look which of its tensors are shown to be right, and which to be wrong. Pure but for that."""
    alike = []
    for look in looks.values():
        if [rank.place for rank in look.served.ranks] != [rank.place for rank in look.now]:
            look.wrong["its layout"] = "changed between two looks at its weights"
            continue
        alike.append(look)
        _compare_with_sent(look, sent or {})
        if look.current:
            _compare_with_changes(look, sent or {}, _changed(sent, sent_before))
    _compare_engines(alike)


def _changed(sent: Sent | None, before: Sent | None) -> dict[str, bool]:
    """The source's tensors of both versions, where they are of one dtype: whether their content differs."""
    if not sent or not before:
        return {}
    both = (name for name in sent.keys() & before.keys() if sent[name][0] == before[name][0])
    return {name: sent[name] != before[name] for name in both}


def _compare_with_sent(look: Look, sent: Sent) -> None:
    for tensor in look.tensors():
        if look.is_comparable(tensor, sent):
            if tensor.now in sent[tensor.name]:
                look.shown.add(tensor.key)
            else:
                look.blame(tensor, KEPT if tensor.now == tensor.before else "has other bytes than were sent")


def _compare_with_changes(look: Look, sent: Sent, changed: Mapping[str, bool]) -> None:
    """Of the tensors that aren't as they were sent. A shard may be unchanged where the tensor isn't; all can't be."""
    shards: dict[tuple[int, str], list[Tensor]] = defaultdict(list)  # (stage, name) -> those that had to change
    for tensor in look.tensors():
        parts = parts_of(tensor.name)
        if look.is_comparable(tensor, sent) or tensor.before is None or not changed.keys() >= set(parts):
            continue
        if any(changed[part] for part in parts):
            shards[look.now[tensor.rank].place[2], tensor.name].append(tensor)
        elif tensor.now == tensor.before:
            look.shown.add(tensor.key)
        else:
            look.blame(tensor, "has changed, and what was sent of it had not")
    for tensors in shards.values():
        moved = [tensor for tensor in tensors if tensor.now != tensor.before]
        look.shown.update(tensor.key for tensor in moved)
        if not moved:
            look.blame(tensors[0], KEPT)


def _compare_engines(looks: Sequence[Look]) -> None:
    """Copies that were equal when they were last seen must be equal now."""
    copies: dict[tuple[object, str, str], list[tuple[Look, Tensor]]] = defaultdict(list)
    for look in looks:
        for tensor in look.tensors():
            if tensor.known is not None:
                copies[look.now[tensor.rank].place, tensor.name, tensor.known].append((look, tensor))
    for group in copies.values():
        counts = Counter(tensor.now for _, tensor in group)
        if len(counts) == 1:
            for look, tensor in group if len(group) > 1 else ():
                look.copied.add(tensor.key)
            continue
        # One that is as before while a copy has changed is the stale one; of several new values, the majority's.
        fresh = Counter(tensor.now for _, tensor in group if tensor.now != tensor.before).most_common()
        right = fresh[0][0] if len(fresh) == 1 or fresh[0][1] > fresh[1][1] else None
        for look, tensor in group:
            if tensor.now != right and tensor.key not in look.shown:
                look.blame(tensor, KEPT if tensor.now == tensor.before else "has other bytes than its copies")


class WeightCheck:
    """The weights of one publication: looked at before the pause, where they aren't known, and behind the load."""

    def __init__(self, records: WeightRecords, transport: Transport) -> None:
        self._records, self._transport = records, transport
        self._sent: Sent | None = None
        self._found: dict[str, tuple[Sequence[RankDigests], float]] = {}  # engine -> digests, milliseconds
        self._parts = 1

    @property
    def off(self) -> bool:
        return self._records.mode == "off"

    # ---- while the engines generate -------------------------------------------------------------------------------

    async def meet(self, members: Sequence[Member], version: str) -> None:
        """Look at the engines whose weights aren't known by content. `version`: the one in force."""
        if self.off:
            return
        auto = self._records.mode == "auto"
        ahead, paused = (AUTO_AHEAD_BYTES, AUTO_PAUSED_BYTES) if auto else (math.inf, math.inf)
        expect_digests(self._transport, ahead, paused)
        new = await asyncio.gather(*(self._meet(member, version) for member in members))
        await self._learn_start(filter(None, new), ahead)
        parts = math.ceil(self._records.slowest_ms / AUTO_MS)
        if self._records.mode == "sample":
            self._parts = max(SAMPLED_PARTS, parts)
        elif auto:
            self._parts = max(1, parts)

    async def _meet(self, member: Member, version: str) -> EngineClient | None:
        """The client of an engine that was looked at now."""
        records, client = self._records, member.client
        current = version if member.status == "confirmed" and member.version == version else None
        known, without = records.served.get(client.name), records.without.get(client.name)
        if known is not None and known.instances == client.instances and known.version == current is not None:
            return None
        if without is not None and without[0] == client.instances:
            return None
        records.without.pop(client.name, None)
        started = time.perf_counter()
        try:
            ranks = await client.weight_digests(deadline=min(MEET_S, client.deadlines.load))
        except EngineError as error:
            records.served.pop(client.name, None)
            records.without[client.name] = (client.instances, error.seen)
            return None
        records.slowest_ms = max(records.slowest_ms, ms_since(started))
        same = known is not None and known.instances == client.instances
        comparable = known.comparable if known is not None and same else [{} for _ in ranks]
        served = ServedWeights(client.instances, current, ranks, frozenset(), comparable)
        if records.sent is not None:
            served.learn(records.sent)
        records.served[client.name] = served
        return client

    async def _learn_start(self, clients: Iterable[EngineClient], most_bytes: float) -> None:
        """Before the first publication: which tensors are as they were in the checkpoint that an engine started with,
        where this machine sees it."""
        if self._records.sent is not None:
            return
        started = await ServedModels().checkpoints(list(clients))
        by_path = {found.where: found for found in started.values() if found.nbytes <= most_bytes}
        with suppress(OSError):  # it may be removed by now
            digests = {where: await asyncio.to_thread(of_checkpoint, found) for where, found in by_path.items()}
            for engine, found in started.items():
                if found.where in digests:
                    self._records.served[engine].learn(digests[found.where])

    # ---- behind the load ------------------------------------------------------------------------------------------

    async def look(self, target: Target) -> None:
        """Raises EngineError."""
        if target.name not in self._records.served:
            target.outcome.weights_not_verified = self._records.without[target.name][1]
            return
        started = time.perf_counter()
        ranks = await target.client.weight_digests(self._skipped(target))
        self._found[target.name] = (ranks, ms_since(started))

    def _skipped(self, target: Target) -> list[str]:
        """The tensors outside of this publication's sample."""
        if self._parts == 1:
            return []
        turn = self._records.publications % self._parts
        names = {name for rank in self._records.served[target.name].ranks for name in rank.digests}
        return sorted(name for name in names if zlib.crc32(name.encode()) % self._parts != turn)

    async def judge(self, targets: Sequence[Target]) -> None:
        """Write the verdict into each engine's outcome, and what is wrong into the target."""
        self._sent = await digests_of(self._transport)
        looks = {name: self._look(name) for target in targets if (name := target.name) in self._found}
        judge(looks, self._sent, self._records.sent)
        for target in targets:
            if target.name in looks:
                _note(target, looks[target.name])

    def _look(self, engine: str) -> Look:
        served = self._records.served[engine]
        return Look(served, self._found[engine][0], current=served.version is not None)

    def keep(self, confirmed: Iterable[Target], version: str) -> dict[str, Any] | None:
        """The confirmed engines have these weights from now on. Returns their digests, to be recorded."""
        records = self._records
        if self.off:
            return None
        records.publications += 1
        seen = {target.name: self._found[target.name] for target in confirmed if target.name in self._found}
        for engine, (ranks, _) in seen.items():
            records.served[engine] = _after(records.served[engine], ranks, version)
            if self._sent is not None:
                records.served[engine].learn(self._sent)
        # At the first look a scheduler answers behind a step of other work; here nothing else keeps it.
        estimates = [ms * _share(records.served[engine].ranks, ranks) for engine, (ranks, ms) in seen.items()]
        records.slowest_ms = max(estimates, default=records.slowest_ms)
        records.sent = self._sent
        return _row(version, self._sent, {engine: ranks for engine, (ranks, _) in seen.items()})


def _note(target: Target, look: Look) -> None:
    outcome = target.outcome
    target.weights_wrong = look.why_wrong()
    outcome.tensors_looked_at, outcome.tensors_verified = look.looked_at, look.verified
    if look.wrong:
        outcome.weights_verified = False
    elif look.verified:
        outcome.weights_verified = True
    else:
        outcome.weights_not_verified = "nothing is known that its tensors could be compared with"


def _share(all_tensors: Sequence[RankDigests], looked_at: Sequence[RankDigests]) -> float:
    """How many times as many tensors there are as were looked at."""
    there, seen = (sum(len(rank.digests) for rank in ranks) for ranks in (all_tensors, looked_at))
    return there / max(seen, 1)


def _row(version: str, sent: Sent | None, seen: Mapping[str, Sequence[RankDigests]]) -> dict[str, Any] | None:
    """A line of weight_digests.jsonl: ranks with the same digests share them."""
    ranks: dict[tuple[object, frozenset[tuple[str, str]]], dict[str, Any]] = {}
    for engine, digests in seen.items():
        for rank in digests:
            key = rank.place, frozenset(rank.digests.items())
            row = ranks.setdefault(key, {"place": rank.place, "engines": [], "digests": rank.digests})
            row["engines"] += [engine] * (engine not in row["engines"])
    return {"version": version, "sent": sent, "ranks": list(ranks.values())} if seen else None


def _after(before: ServedWeights, ranks: Sequence[RankDigests], version: str) -> ServedWeights:
    """What is known of an engine's weights now; of what wasn't looked at, that it had a digest once."""
    pairs = list(zip(before.ranks, ranks, strict=True))
    unseen = frozenset(name for old, new in pairs for name in old.digests.keys() - new.digests.keys())
    merged = [RankDigests(new.place, {**old.digests, **new.digests}) for old, new in pairs]
    return ServedWeights(before.instances, version, merged, unseen, before.comparable)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more tensors" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
