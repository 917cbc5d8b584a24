"""Faults of a publication planted on a real engine, and the runs that they contaminate.

A case is a run of its own with one publication of v1 over v0, one optimiser step apart, and twelve rollouts: four
before it, four in flight, four after it. What the engine answers is recorded as any run records it; only where a fault
is one of the records themselves are they altered.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from checks import reset
from engine_api import Api, Endless

from slime_backend.audit.sampling import Plan
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Span
from tests.one_step import LETTERS

EACH = 4  # rollouts before the publication, in flight, and after it
SHARED, OWN = 40, 8  # tokens of a prompt: shared by the case's fan-out, and its own
TOKENS = 8  # of an answer before or after the publication

# Fault -> how many of the twelve it contaminates.
CONTAMINATED = {
    "wrong label": 2 * EACH,
    "missed tensor": 2 * EACH,
    "loaded in part": 2 * EACH,
    "stale prefix": 1,
    "carried, not recomputed": EACH,
}


def sample_size(fault: str) -> int:
    """Rollouts of a case to audit, so that one of the contaminated is among them for certain."""
    plan = Plan(3 * EACH, EACH)
    return next(n for n in range(1, plan.recorded + 1) if plan.chance(CONTAMINATED[fault], n) == 1.0)


class Case:
    """One run: `play` generates on the engine and plants the fault, `write` makes the run directory."""

    def __init__(self, api: Api, paths: dict[str, Path], seed: int) -> None:
        self.api, self.paths, self.seed = api, paths, seed
        self.rng = random.Random(seed)
        self.records: list[RolloutRecord] = []
        self.contaminated: set[str] = set()

    def play(self, fault: str | None, checkpoint: Path | None = None) -> None:
        """`checkpoint`: what is loaded as v1, where that is the fault. None of a `fault`: a clean publication."""
        crossed = self._play(fault, checkpoint)
        assert all(r.mixed for r in self.records if r.receipt in crossed)
        if fault == "carried, not recomputed":
            self.records = [_declared_recomputed(r) if r.receipt in crossed else r for r in self.records]

    def _play(self, fault: str | None, checkpoint: Path | None) -> list[str]:
        api = self.api
        reset(api, {"v0": str(self.paths["v0"])})
        shared = self._tokens(SHARED)
        prompts = [[*shared, *self._tokens(OWN)] for _ in range(3 * EACH)]
        before, in_flight, after = (prompts[i * EACH : (i + 1) * EACH] for i in range(3))
        if fault is None and self.seed % 2:
            fault = "in place"  # every other clean case keeps its KV, and nobody shares it afterwards
        in_place = fault in ("stale prefix", "carried, not recomputed", "in place")
        if in_place:  # with the cache on nothing but another prompt keeps requests from what was computed before
            alone = 1 if fault == "stale prefix" else 0
            after = [*after[:alone], *(self._apart(shared) for _ in after[alone:])]
        self._add(before, api.generate(before, TOKENS))
        call = Endless(api, in_flight).started()
        api.pause("in_place" if in_place else "retract")
        if not in_place:
            assert api.flush() == 200
        if fault != "wrong label":
            api.load(str(checkpoint or self.paths["v1"]))
        api.label("v1")
        api.resume()
        crossed = self._add(in_flight, call.result())
        later = self._add(after, api.generate(after, TOKENS))
        self.contaminated = {
            None: set(),
            "in place": set(),
            "carried, not recomputed": set(crossed),
            "stale prefix": set(later[:1]),
        }.get(fault, {*crossed, *later})
        return crossed

    def play_stale_among(self, rollouts: int, at_once: int) -> str:
        """So many rollouts under v1, the first of which matches a prefix that v0 computed; its receipt."""
        api, shared = self.api, self._tokens(SHARED)
        reset(api, {"v0": str(self.paths["v0"])})
        api.generate([*shared, *self._tokens(OWN)], 1)
        api.pause("in_place")
        api.load(str(self.paths["v1"]))
        api.label("v1")
        api.resume()
        prompts = [[*shared, *self._tokens(OWN)], *(self._apart(shared) for _ in range(rollouts - 1))]
        for start in range(0, rollouts, at_once):
            some = prompts[start : start + at_once]
            self._add(some, api.generate(some, TOKENS))
        return self.records[0].receipt

    def write(self, run_dir: Path) -> Path:
        (run_dir / "weights").mkdir(parents=True)
        for version in ("v0", "v1"):
            (run_dir / "weights" / version).symlink_to(self.paths[version])
        (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(r.to_json()) + "\n" for r in self.records))
        return run_dir

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(LETTERS) for _ in range(count)]

    def _apart(self, shared: list[int]) -> list[int]:
        """A prompt that begins otherwise: one token in common would be a stale prefix too, and the audit finds it."""
        while (prompt := self._tokens(SHARED + OWN))[0] == shared[0]:
            pass
        return prompt

    def _add(self, prompts: list[list[int]], answers: list[Any]) -> list[str]:
        receipts = []
        for prompt, answer in zip(prompts, answers, strict=True):
            receipts.append(f"{self.seed}-{len(self.records)}")
            self.records.append(
                RolloutRecord.from_answer(
                    answer,
                    receipt=receipts[-1],
                    group="g",
                    engine="engine0",
                    question="",
                    prompt_ids=prompt,
                    temperature=1.0,
                    reward=0.0,
                    submitted_at=0.0,
                )
            )
        return receipts


def _declared_recomputed(record: RolloutRecord) -> RolloutRecord:
    """The record of a rollout that kept its KV, with the segments that a retract would have left."""
    assert record.carried
    segments = tuple(
        KvSegment(s.start, s.end, s.version, (Span(s.version, 0, s.context[-1].end),)) for s in record.segments
    )
    return replace(record, segments=segments)
