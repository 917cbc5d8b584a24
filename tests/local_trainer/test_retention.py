"""Which checkpoints `keep_versions` removes, and what an audit makes of a run whose old ones are gone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.audit import follow as audit_follow
from slime_backend.audit.audit import AuditResult, audit_run
from slime_backend.config import ConfigError, make_config
from slime_backend.local_trainer import loop
from slime_backend.local_trainer.checkpoint import forget_unpublished
from slime_backend.local_trainer.retention import audit_is_behind, prune, removable
from slime_backend.simulation.models import load_model
from tests.provenance.conftest import MadeRun, pure, recomputed

PRESENT = [f"v{i}" for i in range(11)] + ["base", "v", "v1.bak"]


@pytest.mark.parametrize(
    ("keep", "needed", "gone"),
    [
        (2, [], [f"v{i}" for i in range(9)]),
        (11, [], []),
        (100, [], []),
        (2, ["v10"], [f"v{i}" for i in range(9)]),
        (2, ["v4", "v7"], ["v0", "v1", "v2", "v3"]),  # a rollout that began under v4 may name any later one
        (2, ["v0"], []),
    ],
)
def test_what_may_go(keep, needed, gone):
    assert removable(PRESENT, 10, keep, needed) == gone


def checkpoints(weights, names):
    for name in names:
        (weights / name).mkdir(parents=True)
        (weights / name / "config.json").write_text("{}")
        (weights / name / "model.safetensors").write_bytes(b"x")


def test_old_versions_go_and_the_one_that_engines_started_from_stays(tmp_path):
    checkpoints(tmp_path, PRESENT)
    assert prune(tmp_path, 10, 3, {"v6"}, "v2") == ["v0", "v1", "v3", "v4", "v5"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["v2", *PRESENT[6:]])
    assert prune(tmp_path, 10, 3, {"v6"}, "v2") == []


def test_a_removal_that_a_kill_cut_short_leaves_no_version_and_is_finished(tmp_path):
    checkpoints(tmp_path, ["v0", "v1", "v2", "v3"])
    (tmp_path / "v1" / "config.json").unlink()
    assert prune(tmp_path, 3, 2, set(), "v0") == ["v1"]


@pytest.fixture
def run_loop(tmp_path):
    """`run_loop(behind)`: the loop's own step of removal at v9, keep 2, in front of ten checkpoints."""

    def run(keep, behind=None, in_flight=()):
        checkpoints(tmp_path / "weights", [f"v{i}" for i in range(10)])
        if behind is not None:
            audit_follow.save(tmp_path, AuditResult(waiting=behind, finished=False))
        self: Any = SimpleNamespace(
            config=SimpleNamespace(publication=SimpleNamespace(keep_versions=keep)),
            audit_process=None if behind is None else object(),
            run_dir=tmp_path,
            worker=SimpleNamespace(versions_in_flight=lambda: set(in_flight)),
            started_from="v0",
        )
        asyncio.run(loop._Run._remove_old_versions(self, 9))
        return sorted(p.name for p in (tmp_path / "weights").iterdir())

    return run


def test_all_are_kept_by_default(run_loop):
    assert make_config({}, "test").publication.keep_versions is None
    assert len(run_loop(None)) == 10


@pytest.mark.parametrize(
    ("behind", "in_flight", "left"),
    [
        (None, (), ["v0", "v8", "v9"]),
        (0, ("v9",), ["v0", "v8", "v9"]),
        (3, (), [f"v{i}" for i in range(10)]),  # the audit process still needs them
        (None, ("v6",), ["v0", "v6", "v7", "v8", "v9"]),
    ],
)
def test_the_loop_removes_what_nobody_needs(run_loop, behind, in_flight, left):
    assert run_loop(2, behind, in_flight) == left


def test_an_audit_that_has_not_reported_is_behind(tmp_path):
    assert audit_is_behind(tmp_path)


def test_one_version_alone_is_refused():
    with pytest.raises(ConfigError, match="keep_versions=1"):
        make_config({"keep_versions": 1}, "test")


@pytest.mark.parametrize("rollouts", [None, 6])
def test_an_audit_checks_the_versions_that_are_there_and_counts_the_others(tmp_path, rollouts):
    run = MadeRun(tmp_path)
    records = [replace(run.record(pure(f"v{i % 3}")), receipt=f"r{i}") for i in range(9)]
    records.append(replace(run.record(recomputed("v0", "v1", 5)), receipt="both"))
    run.write(records)
    rows = [{"previous_version": f"v{i}", "version": f"v{i + 1}"} for i in range(2)]
    (tmp_path / "publications.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prune(tmp_path / "weights", 2, 2, set(), "v2") == ["v0"]
    result = audit_run(tmp_path, load_model, rollouts=rollouts)
    assert (result.rollouts, result.gone, result.recorded, result.violations) == (6, 4, 10, [])
    assert result.clean
    assert "the weights of 4 more were no longer there" in result.verdict.text
    (tmp_path / "publications.jsonl").unlink()  # the control: versions that were never published are violations
    unknown = audit_run(tmp_path, load_model, rollouts=None)
    assert {v.fault for v in unknown.violations} == {"unknown version"}
    assert len(unknown.violations) == 4


def test_a_resumed_run_removes_what_was_not_published_and_what_a_killed_writer_left(tmp_path):
    for name in ("v1", "v2", "v3", ".v3.0123.partial", "default", ".default.0123.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    forget_unpublished(tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {"v1", "v2", "default", ".default.0123.partial"}
