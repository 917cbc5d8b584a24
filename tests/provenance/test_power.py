"""How small a step between two versions may be for its faults to be found. Prints a table of docs/benchmarks/audit.md.

No engine: what one would answer under each fault is scored by the reference, so an engine's own noise (up to 2e-6) is
left out. tests/engine_plugin/test_audit_engine.py plants the same faults on a real engine, at one size of step.
"""

from __future__ import annotations

import random

import pytest

from slime_backend.audit.diagnosis import as_carried
from slime_backend.audit.scorer import Mix, Scorer
from slime_backend.provenance.records import RolloutRecord
from slime_backend.simulation.models import load_model
from slime_backend.wire import KvSegment, Span
from tests.one_step import LETTERS, PROMPT, one_step_apart

CASES, OUTPUT, AT, CACHED = 20, 64, 32, 40
STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)
TOLERANCES = (1e-4, 1e-5)
END = PROMPT + OUTPUT - 1
OLD = KvSegment(0, AT, "v0", (Span("v0", 0, PROMPT + AT - 1),))
CLAIM = (OLD, KvSegment(AT, OUTPUT, "v1", (Span("v1", 0, END),)))  # retracted, and computed again by v1


@pytest.mark.soak
def test_what_is_found_by_the_size_of_the_step(tmp_path, capsys):
    for step in STEPS:
        worst = differences(tmp_path / f"{step:g}", step)
        counts = {fault: [sum(x > t for x in found) for t in TOLERANCES] for fault, found in worst.items()}
        with capsys.disabled():
            print(f"\n{step:g}: " + ", ".join(f"{fault} {a} / {b}" for fault, (a, b) in counts.items()), end="")
        if step == max(STEPS):
            assert all(found == [CASES, CASES] for found in counts.values())
        if step == min(STEPS):  # nothing moved, nothing is found
            assert all(found == [0, 0] for found in counts.values())


def differences(folder, step):
    """Fault -> the largest difference in each case: two rollouts, one where a fault concerns one."""
    one_step_apart(folder, step)
    scorer = Scorer(folder, load_model)
    names = [name for name, _ in scorer.model("v1").named_parameters()]
    rng = random.Random(1)
    worst = {}

    def add(fault, count, truth, mix=None):
        records = [rollout(rng) for _ in range(count)]
        found = [
            abs(a - b)
            for r in records
            for a, b in zip(scorer.score_all(r, truth, mix), scorer.score_all(r, CLAIM), strict=True)
        ]
        worst.setdefault(fault, []).append(max(found))

    stale = KvSegment(AT, OUTPUT, "v1", (Span("v0", 0, CACHED), Span("v1", CACHED, END)))
    for case in range(CASES):
        tensor, cut = names[case % len(names)], rng.randrange(2, len(names) - 2)
        add("wrong label", 2, (OLD, KvSegment(AT, OUTPUT, "v0", (Span("v0", 0, END),))))
        add("missed tensor", 2, CLAIM, Mix("v1", "v0", frozenset([tensor])))
        add("loaded in part", 2, CLAIM, Mix("v1", "v0", frozenset(names[cut:])))
        add("stale prefix", 1, (OLD, stale))
        add("carried, not recomputed", 2, as_carried(CLAIM))
    return worst


def rollout(rng):
    ids = tuple(rng.randrange(LETTERS) for _ in range(PROMPT + OUTPUT))
    return RolloutRecord(
        *("r", "g", "engine0", "q", ids[:PROMPT], ids[PROMPT:], (0.0,) * OUTPUT, 1.0, 0.0, "length"),
        *((), CLAIM, (), 0.0, 1.0),
    )
