"""Every fault that the diagnosis has a word for, made without an engine, and what it can't explain.

tests/engine_plugin/test_audit_engine.py plants the same on a real one.
"""

from __future__ import annotations

import dataclasses

import pytest

from slime_backend.audit.audit import audit_run, check
from slime_backend.audit.diagnosis import Diagnostician, nearest
from slime_backend.audit.scorer import Mix
from slime_backend.simulation.models import load_model
from slime_backend.wire import KvSegment

from .conftest import OUTPUT, PROMPT, carried, pure, recomputed, span

LAST = "lm_head.weight"
STALE = (KvSegment(0, OUTPUT, "v2", (span("v1", 0, 40), span("v2", 40, PROMPT + OUTPUT - 1))),)


def half(made_run):
    names = made_run.scorer.differing_tensors("v2", "v1")
    return Mix("v2", "v1", frozenset(names[len(names) // 2 :]))


CASES = {
    "wrong label": (lambda run: run.record(pure("v1"), pure("v2")), "v1 explains what it calls v2"),
    "stale prefix": (
        lambda run: run.record(STALE, pure("v2"), cached=40),
        "the 40 cached tokens that it calls v2's had been computed by v1 (0..40)",
    ),
    "carried, not recomputed": (
        lambda run: run.record(carried("v1", "v2", 9), recomputed("v1", "v2", 9)),
        "the KV of v1 was kept",
    ),
    "recomputed, not carried": (lambda run: run.record(recomputed("v1", "v2", 9), carried("v1", "v2", 9)), "each"),
    "missed tensor": (
        lambda run: run.record(pure("v2"), mix=Mix("v2", "v1", frozenset([LAST]))),
        f"v2 with {LAST} of v1",
    ),
    "loaded in part": (lambda run: run.record(pure("v2"), mix=half(run)), "v2 with v1's tensors from"),
    "unexplained": (
        lambda run: dataclasses.replace(run.record(pure("v2")), logprobs=(-1.0,) * OUTPUT),
        "no version on disk",
    ),
}


def test_what_is_no_number_is_not_explained(made_run):
    record = made_run.record(pure("v2"))
    record = dataclasses.replace(record, logprobs=(float("nan"), *record.logprobs[1:]))
    assert Diagnostician(made_run.scorer, 1e-4).explain(record).fault == "unexplained"


@pytest.mark.parametrize("fault", CASES)
def test_the_fault_is_named(made_run, fault):
    make, text = CASES[fault]
    record = make(made_run)
    assert check(record, made_run.scorer, 1e-4)[0] is not None
    found = Diagnostician(made_run.scorer, 1e-4).explain(record)
    assert (found.fault, text in found.text) == (fault, True), found


def test_a_cached_prompt_of_two_other_versions(made_run):
    """A system prompt of v0 that stayed, behind it what v1 added; others matched the former alone."""
    end = PROMPT + OUTPUT - 1
    truth = (KvSegment(0, OUTPUT, "v2", (span("v0", 0, 31), span("v1", 31, 50), span("v2", 50, end))),)
    record = made_run.record(truth, pure("v2"), cached=50)
    diagnostician = Diagnostician(made_run.scorer, 1e-4)
    assert diagnostician.explain(record).fault == "unexplained"
    diagnostician = Diagnostician(made_run.scorer, 1e-4)
    diagnostician.note(made_run.record(pure("v2"), cached=31))
    found = diagnostician.explain(record)
    assert found.fault == "stale prefix"
    assert "v0 (0..31) and v1 (31..50)" in found.text


def test_a_mix_is_looked_for_once(made_run, monkeypatch):
    diagnostician = Diagnostician(made_run.scorer, 1e-4)
    records = [made_run.record(pure("v2"), mix=half(made_run)) for _ in range(3)]
    scored = []
    score = made_run.scorer.score

    def counting(*args):
        scored.append(args)
        return score(*args)

    monkeypatch.setattr(made_run.scorer, "score", counting)
    costs = []
    for record in records:
        assert diagnostician.explain(record).fault == "loaded in part"
        costs.append(len(scored) - sum(costs))
    assert costs[1] == costs[2] < costs[0] / 5


def test_several_faults_in_one_run_are_counted(made_run):
    bad = [CASES[fault][0](made_run) for fault in ("wrong label", "wrong label", "stale prefix")]
    made_run.write([*(made_run.record(pure("v1")) for _ in range(5)), *bad])
    result = audit_run(made_run.directory, load_model)
    assert result.verdict.outcome == "contaminated"
    assert "3 of the audited rollouts don't hold: 2 wrong label, 1 stale prefix" in result.verdict.text


def test_nearest_versions_older_first():
    known = [f"v{i}" for i in range(8)]
    assert nearest("v3", known) == ["v2", "v4", "v1", "v5", "v0"]
    assert nearest("v0", known) == ["v1", "v2", "v3", "v4"]
    assert nearest("v7", known) == ["v6", "v5", "v4", "v3", "v0"]
    assert nearest("v9", known) == ["v7", "v6", "v5", "v4", "v0"]
