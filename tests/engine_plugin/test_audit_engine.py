"""Faults of a publication on a real engine: each is found, named, and nothing else is; clean publications pass.

The two versions are one optimiser step of 1e-3 apart, less than any step of the demo (1.7e-3 to 1e-2). The audit sees
what it sees in a run: the records and the weights that were meant to be served. What isn't tested here: how the sample
is drawn (tests/provenance/test_sampling.py), but for the one stale request in ten thousand; how small a step may be
(tests/provenance/test_power.py).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_api import Api, Serve
from planted import CONTAMINATED, Case, sample_size

from slime_backend.audit.audit import AuditResult, audit_run
from slime_backend.audit.sampling import Plan, Sample
from slime_backend.simulation.models import load_model
from tests.one_step import mixed, one_step_apart, tensor_names

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = int(os.environ.get("REEF_AUDIT_CASES", "2"))  # 100 for a release
CLEAN = int(os.environ.get("REEF_AUDIT_CLEAN", "2"))  # 50
SAID_EVERY = 25
STEP = 1e-3
TOLERANCE = 1e-5  # a tiny fp32 model differs by up to 2e-6


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return one_step_apart(tmp_path_factory.mktemp("apart"), STEP)


@pytest.fixture(scope="module")
def api(serve: Serve, paths: dict[str, Path]) -> Iterator[Api]:
    with serve(str(paths["v0"])) as api:
        yield api


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The engine needs the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def audited(case: Case, run_dir: Path, rollouts: int | None, tolerance: float = TOLERANCE) -> AuditResult:
    return audit_run(case.write(run_dir), load_model, rollouts=rollouts, tolerance=tolerance, seed=case.seed)


def checkpoint_for(fault: str, paths: dict[str, Path], folder: Path, seed: int) -> Path | None:
    """What is loaded as v1: one tensor after the other stays v0's, or the second part from changing places on."""
    names = tensor_names(paths)
    if fault == "missed tensor":
        return mixed(paths, [names[seed % len(names)]], folder / f"checkpoint{seed}")
    if fault == "loaded in part":
        return mixed(paths, names[random.Random(seed).randrange(2, len(names) - 2) :], folder / f"part{seed}")
    return None


@pytest.mark.parametrize("fault", CONTAMINATED)
def test_a_planted_fault_is_found_and_named(fault, api, paths, tmp_path):
    found = named = 0
    for seed in range(CASES):
        case = Case(api, paths, seed)
        case.play(fault, checkpoint_for(fault, paths, tmp_path, seed))
        assert len(case.contaminated) == CONTAMINATED[fault]
        result = audited(case, tmp_path / f"run{seed}", sample_size(fault))
        assert {v.receipt for v in result.violations} <= case.contaminated
        found += result.verdict.outcome == "contaminated"
        named += {v.fault for v in result.violations} == {fault}
        if (seed + 1) % SAID_EVERY == 0 or seed + 1 == CASES:
            done = f"found {found} of {seed + 1}, named rightly {named}"
            print(f"{fault}: {sample_size(fault)} of 12 audited, {done}", flush=True)
    assert found == CASES
    assert named >= 0.95 * CASES


def test_clean_publications_raise_no_alarm(api, paths, tmp_path):
    """Retracted and flushed, or in place, by turns; requests in flight and, after a retract, fan-out."""
    kinds, largest = set(), 0.0
    for seed in range(CLEAN):
        case = Case(api, paths, seed)
        case.play(None)
        result = audited(case, tmp_path / f"run{seed}", None)
        assert result.violations == []
        assert result.verdict.outcome == "clean"
        kinds |= set(result.differences)
        largest = max(largest, result.max_abs_logprob_diff)
    print(f"clean: {CLEAN} runs, 0 alarms, largest difference {largest:.1e}")
    assert kinds == {"own", "recomputed", "carried"}


@pytest.mark.soak
def test_one_stale_request_in_ten_thousand(api, paths, tmp_path):
    """10,000 rollouts of which one matched a prefix of older weights. The plan asks for 9,900 of them: of a hundred
    samples of that size some 99 hold the one; the audit of all names it and nothing else."""
    rollouts, at_once = 10_000, 100
    case = Case(api, paths, 1)
    stale = case.play_stale_among(rollouts, at_once)
    result = audited(case, tmp_path / "run", None)
    assert [v.receipt for v in result.violations] == [stale]
    assert result.violations[0].fault == "stale prefix"
    plan = Plan(rollouts, sum(r.crossing for r in case.records))
    enough = plan.rollouts(rollouts)
    hits = sum(stale in drawn(case, enough, seed) for seed in range(100))
    print(f"one of {rollouts}: found; {hits} of 100 samples of {enough} hold it")
    assert 95 <= hits <= 100


def drawn(case: Case, count: int, seed: int) -> set[str]:
    sample = Sample(count, seed)
    for record in case.records:
        sample.offer(record.receipt, record.crossing)
    return sample.holds()
