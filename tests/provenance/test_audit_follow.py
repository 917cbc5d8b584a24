"""The audit beside a run: a ledger that grows, is sealed, is left by its writer, falls silent, or loses its weights.

No engine and no trainer here: tests/local_trainer/test_audit_process.py has the process, tests/test_run_engine.py a
run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from slime_backend.audit.audit import Audit, AuditResult, audit_run
from slime_backend.audit.follow import Ending, follow, load, save_fullest
from slime_backend.ledger.catch_up import is_written
from slime_backend.ledger.files import Tail, list_segments
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.errors import AuditError
from slime_backend.simulation.models import load_model
from tests.provenance.conftest import carried, pure
from tests.waiting import wait_until

LONG = 60.0  # a deadline that isn't meant to come


@pytest.fixture
def run_dir(tmp_path, made_run):
    shutil.copytree(made_run.directory / "weights", tmp_path / "run" / "weights")
    return tmp_path / "run"


def records(made_run, count, bad):
    """`count` rollouts of two versions; number `bad` claims another than it is of."""
    return [
        made_run.record(pure("v1"), pure("v2"))
        if i == bad
        else made_run.record(carried("v0", "v1", 5) if i % 3 else pure("v1"))
        for i in range(count)
    ]


def following(run_dir, audit, **settings):
    """`follow` in a thread; (thread, [result])."""
    results = []
    settings = {"idle_s": LONG, "deadline_s": LONG, "poll_s": 0.05, **settings}
    thread = threading.Thread(target=lambda: results.append(follow(run_dir, audit, **settings)), daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("rollouts", [None, 12])
def test_it_follows_a_growing_ledger_through_rotations_and_ends_with_its_writer(run_dir, made_run, rollouts):
    written = records(made_run, 40, bad=17)
    with Ledger(run_dir, segment_bytes=20_000) as ledger:
        thread, results = following(run_dir, Audit(run_dir, load_model, rollouts=rollouts))
        for record in written:
            ledger.append(record)
            time.sleep(0.02)  # it follows meanwhile
        time.sleep(0.3)  # several looks of its own
        assert thread.is_alive(), "it ended before the run did"
    thread.join(LONG)
    assert not thread.is_alive()
    assert any(s.kind == "parquet" for s in list_segments(run_dir))
    (result,) = results
    after = audit_run(run_dir, load_model, rollouts=rollouts)
    assert result.recorded == after.recorded == 40
    assert result.finished
    assert load(run_dir) == result
    if rollouts is None:
        assert [v.receipt for v in result.violations] == [written[17].receipt]
        assert result.verdict == after.verdict
        assert {k: d["bins"] for k, d in result.differences.items()} == {
            k: d["bins"] for k, d in after.differences.items()
        }
    else:  # the sample of the end, and those that were in it on the way
        assert 12 <= result.rollouts < 40
        assert {v.receipt for v in after.violations} <= {v.receipt for v in result.violations}
        assert result.verdict.finds_one_in == after.verdict.finds_one_in


def test_the_state_on_the_way_says_that_it_is_one(run_dir, made_run, monkeypatch):
    monkeypatch.setattr("slime_backend.audit.follow.SAVE_S", 0.0)
    with Ledger(run_dir) as ledger:
        thread, results = following(run_dir, Audit(run_dir, load_model))
        ledger.append(records(made_run, 1, bad=0)[0])
        state = wait_until(lambda: (found := load(run_dir)) and found.violations and found, "a violation", LONG)
        assert not state.finished
        assert state.verdict.outcome == "contaminated"
    thread.join(LONG)
    assert results[0].finished


def test_it_ends_when_the_writer_is_killed(run_dir, made_run):
    program = (
        "import sys, time, pathlib; from slime_backend.ledger.writer import Ledger; "
        "ledger = Ledger(pathlib.Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        assert is_written(run_dir)
        line = json.dumps(made_run.record(pure("v1")).to_json())
        with (run_dir / "rollouts.jsonl").open("a") as file:
            file.write(line + "\n" + line[:50])  # and one that was being written
        thread, results = following(run_dir, Audit(run_dir, load_model))
        time.sleep(0.5)  # several looks of its own
        assert thread.is_alive()
    finally:
        writer.kill()
        writer.wait()
    thread.join(LONG)
    assert not thread.is_alive()
    assert not is_written(run_dir)
    assert (results[0].recorded, results[0].verdict.outcome) == (1, "clean")


def test_it_ends_when_the_run_falls_silent(run_dir, made_run):
    with Ledger(run_dir) as ledger:
        ledger.append(made_run.record(pure("v0")))
        result = follow(run_dir, Audit(run_dir, load_model), idle_s=0.3, deadline_s=LONG, poll_s=0.05)
    assert (result.recorded, result.rollouts) == (1, 1)
    with pytest.raises(AuditError, match="no rollout was recorded within"):
        follow(run_dir.parent, Audit(run_dir, load_model), idle_s=0.1, deadline_s=LONG, poll_s=0.05)


def test_after_the_run_it_has_until_its_deadline_and_says_what_it_did_not_get_to(run_dir, made_run, monkeypatch):
    with Ledger(run_dir) as ledger:
        for record in records(made_run, 30, bad=None):
            ledger.append(record)
    audit = Audit(run_dir, load_model)
    check = audit.check

    def slow_check(record):
        time.sleep(0.1)
        return check(record)

    monkeypatch.setattr(audit, "check", slow_check)
    result = follow(run_dir, audit, idle_s=LONG, deadline_s=0.3, poll_s=0.05)
    assert 0 < result.rollouts < 30
    assert result.recorded == 30
    assert result.verdict.outcome == "not enough samples"


def test_weights_are_needed_only_while_a_rollout_is_checked(run_dir, made_run):
    """A run that removes old weights: those that were in time are checked, the others are counted."""
    (run_dir / "publications.jsonl").write_text(
        "".join(json.dumps({"previous_version": f"v{i}", "version": f"v{i + 1}"}) + "\n" for i in range(2))
    )
    early, late = [made_run.record(pure("v0")) for _ in range(5)], [made_run.record(pure("v1")) for _ in range(5)]
    with Ledger(run_dir) as ledger:
        audit = Audit(run_dir, load_model)
        thread, results = following(run_dir, audit)
        for record in early:
            ledger.append(record)
        wait_until(lambda: audit.result().rollouts >= len(early), "the early ones are checked", LONG)
        shutil.rmtree(run_dir / "weights" / "v0")
        os.rename(run_dir / "weights" / "v1", run_dir / "weights" / ".v1")
        for record in late:
            ledger.append(record)
    thread.join(LONG)
    assert (results[0].rollouts, results[0].gone, results[0].violations) == (5, 5, [])


def test_a_tail_goes_on_where_it_stopped(run_dir, made_run):
    tail = Tail(run_dir)
    assert list(tail.new()) == []
    with Ledger(run_dir, segment_bytes=15_000) as ledger:
        seen, written = [], []
        for record in records(made_run, 30, bad=None):
            ledger.append(record)
            written.append(record.receipt)
            if len(written) % 7 == 0:
                seen += [row["receipt"] for row in tail.new()]
                assert seen == written
        rest = tail.new()
        seen.append(next(rest)["receipt"])
        del rest  # a reader that stops in the middle goes on behind what it took
    seen += [row["receipt"] for row in tail.new()]
    assert seen == written


def test_when_it_ends():
    """(seconds, written, new rollouts, some waiting) -> over."""

    def run(*looks, idle_s=10.0, deadline_s=5.0):
        ending = Ending(idle_s, deadline_s, 0.0)
        return [ending.is_over(t, written=w, new=n, waiting=q) for t, w, n, q in looks]

    # Not begun: waits, but not for ever.
    assert run((1, False, False, False), (9, False, False, False), (11, False, False, False)) == [False, False, True]
    # Nobody writes and there are rollouts: a run that has ended.
    assert run((1, False, True, False)) == [True]
    # The writer goes: what waits is finished, within the deadline.
    assert run((1, True, True, True), (2, False, False, True), (7, False, False, True)) == [False, False, False]
    assert run((1, True, True, True), (2, False, False, True), (7.5, False, False, True)) == [False, False, True]
    assert run((1, True, True, True), (2, False, False, False)) == [False, True]
    # It comes back in time: a resumed run.
    assert run((1, True, True, True), (2, False, False, True), (8, True, False, True)) == [False, False, False]
    # Silent, with its writer there: what waits is no silence.
    assert run((1, True, True, False), (12, True, False, True), (12, True, False, False)) == [False, False, True]


def test_a_smaller_audit_replaces_no_fuller_one(run_dir):
    few, many = AuditResult(rollouts=3, recorded=9), AuditResult(rollouts=9, recorded=9)
    run_dir.mkdir(exist_ok=True)
    assert [save_fullest(run_dir, result) for result in (few, many, few, many)] == [True, True, False, True]
    assert load(run_dir) == many
