"""Behind `reef-slime rollouts`: ask a run's ledger, print a table, one drawing, or JSON lines."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from slime_backend.provenance.drawing import draw
from slime_backend.provenance.ledger_index import Query
from slime_backend.provenance.ledger_reader import open_reader
from slime_backend.provenance.records import RolloutRecord

DEFAULT_ROWS = 20


def show_rollouts(run_dir: Path, query: Query, limit: int | None, as_json: bool) -> int:
    """Print what matches and return how many rollouts do. `limit` None: all as JSON, the first 20 as a table.

    Raises LedgerError where nothing was recorded.
    """
    with open_reader(run_dir) as reader:
        total = reader.count(query)
        if as_json:
            for record in reader.find(query, limit):
                sys.stdout.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
            return total
        shown = reader.find(query, DEFAULT_ROWS if limit is None else limit)
        first = next(shown, None)
        if first is not None and total == 1:
            _print_one(first)
        elif first is not None:
            _print_table(itertools.chain([first], shown), total)
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
