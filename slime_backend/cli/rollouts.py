"""Behind `reef-slime rollouts` and `reef-slime audit --plan`: what a run's ledger holds, how much of it to check."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from slime_backend.audit.sampling import Plan
from slime_backend.ledger.files import read_records
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.provenance.drawing import draw
from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord

DEFAULT_ROWS = 20
RATES = (10, 100, 1000, 10_000)  # one contaminated rollout in so many


def show_rollouts(run_dir: Path, query: Query, limit: int | None, as_json: bool) -> int:
    """Print what matches and return how many rollouts do. `limit` None: all as JSON, the first 20 as a table.

    Raises LedgerError where nothing was recorded.
    """
    with open_reader(run_dir) as reader:
        total = reader.count(query)
        if as_json:
            for record in reader.find(query, limit):
                sys.stdout.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
            if reader.damage:
                sys.stderr.write(f"{reader.damage}\n")
            return total
        shown = reader.find(query, DEFAULT_ROWS if limit is None else limit)
        first = next(shown, None)
        if first is not None and total == 1:
            _print_one(first)
        elif first is not None:
            _print_table(itertools.chain([first], shown), total)
        if reader.damage:
            sys.stdout.write(f"{reader.damage}\n")
        return total


def _print_table(records: Iterable[RolloutRecord], total: int) -> None:
    """Plain aligned lines: a table with borders has no room for a receipt in 80 columns."""
    rows = [("receipt", "class", "versions", "tokens", "reward", "prefills", "session", "engine")]
    for r in records:
        figures = (str(len(r.output_ids)), f"{r.reward:.3f}", str(len(r.prefills)))
        rows.append((r.receipt, r.rollout_class, ",".join(r.versions), *figures, r.session, r.engine))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            c.rjust(w) if c[:1].isdigit() and i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    shown = len(rows) - 1
    sys.stdout.write(f"{shown} of {total} rollouts; --limit N shows more\n" if shown < total else f"{total} rollouts\n")


def _print_one(record: RolloutRecord) -> None:
    facts = {
        "receipt": record.receipt,
        "session": record.session,
        "engine": f"{record.engine}, attempts {record.attempts}",
        "class": record.rollout_class + (f" (also {', '.join(record.traits[:-1])})" if record.traits[1:] else ""),
        "versions": " ".join(record.versions),
        "prefills": "; ".join(f"{p.version}: {p.cached} of {p.total} tokens cached" for p in record.prefills),
        "reward": f"{record.reward:.4g}, finished: {record.finish_reason}",
        "time": f"{record.finished_at - record.submitted_at:.2f} s from submission to answer",
    }
    lines = [f"{name:<10}{value}" for name, value in facts.items()]
    sys.stdout.write("\n".join([*lines, draw(record)]) + "\n")


def print_plan(run_dir: Path, probability: float, as_json: bool) -> None:
    """How many rollouts an audit of this run must check. Raises AuditError where nothing was recorded."""
    records = list(read_records(run_dir))
    if not records:
        raise AuditError(f"{run_dir} has no rollouts to audit")
    plan = Plan(len(records), sum(r.crossing for r in records), probability)
    rates = [rate for rate in RATES if rate < plan.recorded] + [plan.recorded]
    rows = [{"one_in": rate, "rollouts": plan.rollouts(rate)} for rate in rates]
    if as_json:
        figures = {"recorded": plan.recorded, "crossing": plan.crossing, "probability": probability}
        sys.stdout.write(json.dumps({**figures, "plan": rows}) + "\n")
        return
    lines = [
        f"{plan.recorded} rollouts recorded, {plan.crossing} of them lived through a publication",
        f"to check a contaminated one with probability {probability:g}, if there is",
        *(
            f"  {'a single one' if row['one_in'] == plan.recorded else 'one in ' + str(row['one_in']):<14}"
            f"reef-slime audit {run_dir} --rollouts {row['rollouts']}"
            for row in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
