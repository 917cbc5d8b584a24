"""The demo's run in bfloat16, as a user starts it: honest it is clean, with unscoped sharing its rollouts are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_backend.run_files import RunDir
from tests.command_line import run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]
SETTINGS = ("dtype=bfloat16", "steps=4", "audit_rollouts=80", "name=bf16")


def train(tmp_path: Path, *more: str) -> tuple[int, dict]:
    words = [word for setting in (*SETTINGS, f"runs_dir={tmp_path}", *more) for word in ("--set", setting)]
    done = run("train", "configs/cpu_tiny.yaml", *words, timeout=900)
    return done.returncode, json.loads(RunDir(tmp_path / "bf16").summary.read_text())


def test_an_honest_run_is_clean(tmp_path: Path) -> None:
    code, summary = train(tmp_path)
    audit = summary["audit"]
    assert (code, audit["verdict"]["outcome"], audit["violations"]) == (0, "clean", 0), audit
    assert audit["decided"] > audit["undecided"]
    assert summary["kv_contradictions"] == 0


def test_a_stale_prefix_is_found_by_likelihood_where_its_slots_show_it(tmp_path: Path) -> None:
    code, summary = train(tmp_path, "disjoint_prefix_sharing=unsafe")
    audit = summary["audit"]
    assert (code, audit["verdict"]["outcome"]) == (1, "contaminated"), audit
    assert audit["violated"]
    assert summary["kv_contradictions"] > 0
