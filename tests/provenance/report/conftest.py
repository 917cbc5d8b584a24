"""A run directory as `reef-slime train` leaves it, without an engine: rollouts of every class, three publications, an
audit. Rows are made by the classes that write them in a run, so that a renamed field shows here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_backend.audit.audit import AuditResult, Violation
from slime_backend.audit.conclusion import conclude
from slime_backend.audit.differences import Differences
from slime_backend.audit.sampling import Plan
from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.report.summary import write_summary

from ..examples import SEGMENTS, example

HOSTILE = (
    "</script><script>document.title='owned'</script>\"'><img src=http://evil.invalid/x onerror=document.title='owned'>"
    '<a href="http://evil.invalid/">go</a>'
)
VIOLATION = Violation("carried-0001", "engine0", "v1", "log-prob", 0.03, 17, "token 17 differs by 0.03", "stale prefix")


def outcome(engine: str, slower: float = 0.0) -> EngineOutcome:
    return EngineOutcome(
        engine,
        {"pause": 4.0 + slower, "flush": 60.0, "load": 20.0 + slower, "label": 80.0, "resume": 100.0},
        paused_ms=170.0,
        in_flight=9,
        requests_retracted=9,
        tokens_to_prefill_again=400,
        flush_verified=True,
        confirmed=True,
    )


def publication(number: int, engines: Sequence[str]) -> PublicationReport:
    outcomes = [outcome(name, slower=3.0 * i) for i, name in enumerate(engines)]
    return PublicationReport(
        f"v{number}",
        f"v{number - 1}",
        "a policy",
        "disk",
        state="resumed",
        started_at=1_796_000_000.0 + 5 * number,
        prepare_ms=5.0,
        verified_ms=70.0,
        wall_ms=280.0,
        engines=outcomes,
    )


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    run_dir: Path,
    *,
    engines: Sequence[str] = ("engine0", "engine1"),
    question: str = "q",
    violations: Sequence[Violation] = (),
    reports: Sequence[PublicationReport] | None = None,
    checked: int = 5,
) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    made = [replace(example(name), engine=engines[i % 2], question=question) for i, name in enumerate(SEGMENTS)]
    lines(run_dir / "submitted.jsonl", [{"receipt": r.receipt} for r in made])
    lines(run_dir / "rollouts.jsonl", [r.to_json() for r in made])
    reports = [publication(k, engines) for k in (1, 2, 3)] if reports is None else reports
    lines(run_dir / "publications.jsonl", [r.to_json() for r in reports])
    steps = [
        {"step": k, "reward_mean": 0.2 + 0.1 * k, "reward_std": 0.05, "lag_mean": 0.5 * k, "lag_max": k}
        for k in (1, 2, 3)
    ]
    lines(run_dir / "steps.jsonl", steps)
    found = Differences()
    found.add([1e-7 * i for i in range(20)])
    audit = AuditResult(
        *(5, 5, 200, 4, 2e-6, 3e-7),
        verdict=conclude(Plan(5, 4), checked, [v.fault for v in violations]),
        differences={"own": found.to_json(), "recomputed": found.to_json()},
        violations=list(violations),
    )
    (run_dir / "audit.json").write_text(json.dumps(audit.to_json()))
    write_summary(run_dir, {"completed": True, "audit": audit.summary(), "policy": "a policy", "wall_s": 9.5})
    return run_dir


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(**what)`: see `write_run`."""

    def make(**what: Any) -> Path:
        return write_run(tmp_path / "run", **what)

    return make
