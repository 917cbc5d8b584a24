"""`reef-slime rollouts` and `reef-slime report` show a run; `print_plan` sizes its audit."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from slime_backend.audit.sampling import Plan
from slime_backend.cli.options import fail
from slime_backend.command_line import command
from slime_backend.ledger.files import read_records
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.provenance.classes import CLASSES
from slime_backend.provenance.drawing import draw
from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord

DEFAULT_ROWS = 20
RATES = (10, 100, 1000, 10_000)  # a rate of N is one contaminated rollout in N


def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
    receipt: Annotated[str | None, typer.Option(help="a receipt, or how it begins; one rollout is drawn")] = None,
    session: Annotated[str | None, typer.Option(help="a session; in the local trainer a group, e.g. g00012")] = None,
    version: Annotated[str | None, typer.Option(help="a version that sampled some of its tokens")] = None,
    rollout_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="pure, recomputed, mixed or carried")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="how many to show; default 20, as JSON all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line per rollout, with tokens")] = False,
) -> None:
    """Look up rollouts in the ledger of a run, also while it is running. Exit code 1 if none matches."""
    if not run_dir.is_dir():
        fail(f"no run directory {run_dir}", code=2)
    if rollout_class is not None and rollout_class not in CLASSES:
        fail(f"--class {rollout_class} is unknown; there are {', '.join(CLASSES)}", code=2)
    if not show_rollouts(run_dir, Query(receipt, session, version, rollout_class), limit, as_json):
        fail(f"no rollout in {run_dir} matches")


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
) -> None:
    """Write RUN_DIR/report.html, a run to look at, and print its path. Reads only the files of the run."""
    from slime_backend.report.write import write_report

    if not run_dir.is_dir():
        fail(f"no run directory {run_dir}", code=2)
    typer.echo(write_report(run_dir))


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
    """Print plain aligned lines: a table with borders has no room for a receipt in 80 columns."""
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
    """Print how many rollouts an audit of this run must check. Raises AuditError where nothing was recorded."""
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
            f"{command('audit', run_dir, '--rollouts', row['rollouts'])}"
            for row in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
