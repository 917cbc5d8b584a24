"""This runs `reef-slime audit`, on a complete run or, with --follow, on one that goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from slime_backend.audit.audit import Audit, AuditResult, audit_run
from slime_backend.audit.follow import follow, save_fullest
from slime_backend.cli.console import console_reporter
from slime_backend.run_files import RunDir
from slime_backend.simulation.models import load_model

LOWEST_PRIORITY = 19


def audit_command(
    run_dir: Path,
    *,
    rollouts: int | None,
    tolerance: float | None,
    one_in: int,
    follow_until: tuple[float, float] | None,
    as_json: bool,
) -> bool:
    """Audit, print the result, and return whether the verdict is clean. `follow_until`: (idle, deadline) in seconds."""
    with console_reporter(quiet=as_json) as reporter:

        def progress(done: int, total: int) -> None:
            reporter.progress("audit", done, total)

        if follow_until is None:
            result = audit_run(
                run_dir, load_model, rollouts=rollouts, tolerance=tolerance, one_in=one_in, progress=progress
            )
            _save(run_dir, result)
        else:
            # The run has priority: one thread, which runs only while the core is idle.
            os.nice(LOWEST_PRIORITY)
            torch.set_num_threads(1)
            audit = Audit(run_dir, load_model, rollouts=rollouts, tolerance=tolerance, one_in=one_in)
            idle_s, deadline_s = follow_until
            result = follow(run_dir, audit, idle_s=idle_s, deadline_s=deadline_s, progress=progress, keep=save_fullest)
            _save(run_dir, result)
    sys.stdout.write(json.dumps(result.to_json()) + "\n" if as_json else _lines(result))
    return result.clean


def _save(run_dir: Path, result: AuditResult) -> None:
    """Save the result for the report unless the run has a fuller audit; a read-only run is only audited."""
    try:
        if not save_fullest(run_dir, result):
            sys.stderr.write(f"{RunDir(run_dir).audit} is left unchanged: it covers more rollouts\n")
    except OSError as error:
        sys.stderr.write(
            f"{RunDir(run_dir).audit} can't be written: {error.strerror}; the result is printed here only\n"
        )


def _measure(result: AuditResult) -> str:
    if result.noise is None:
        return f"tolerance {result.tolerance:g}"
    return f"by likelihood, noise {result.noise:.2g}: {result.decided} decided, {result.undecided} undecided"


def _lines(result: AuditResult) -> str:
    lines = [f"violation: {violation}" for violation in result.violations]
    lines.append(
        f"audited {result.rollouts} of {result.recorded} rollouts ({result.crossing} lived through a publication), "
        f"{result.tokens} tokens: {len(result.violations)} violations, "
        f"largest |log-prob difference| {result.max_abs_logprob_diff:.2g} ({_measure(result)})"
    )
    for found in result.slopes:
        lines.append(
            f"  slope towards {found['fault']}: {found['slope']:.4f} +- {found['error']:.4f} over {found['rollouts']} "
            "comparisons (0: the claim holds, 1: the fault)"
        )
    for kind, found in result.differences.items():
        quantiles = ", ".join(f"{100 * float(share):g} %: {value:.1e}" for share, value in found["quantiles"].items())
        lines.append(f"  {kind:<11}{found['tokens']:>9} tokens; {quantiles}")
    if result.damaged:
        lines.append(
            f"{result.damaged} damaged lines or segments of the ledger can't be read; their rollouts aren't counted"
        )
        lines += [f"  {place}" for place in result.damaged_places]
    lines.append(f"verdict: {result.verdict}")
    return "\n".join(lines) + "\n"
