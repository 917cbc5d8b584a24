"""What every bench prints: one row per case, the peer beside ours, and whether the goal holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class BenchError(RuntimeError):
    """A bench can't measure what it says; the message is one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio`: how many times better ours is than the peer, in the case's own cost (tokens computed, seconds, slots);
    None where nothing is compared."""

    case: str
    peer: float | None
    ours: float
    ratio: float | None
    goal: str
    holds: bool


def ratio(peer_cost: float, our_cost: float) -> float | None:
    return round(peer_cost / our_cost, 2) if our_cost else None


def told(row: Row) -> str:
    """One line, for while the rest is measured."""
    times = "" if row.ratio is None else f", ratio {row.ratio}"
    return f"{row.case}: peer {row.peer}, ours {row.ours}{times} ({'holds' if row.holds else 'MISSED'}: {row.goal})"


def to_json(bench: str, rows: Sequence[Row], error: str | None = None) -> dict[str, Any]:
    """`error`: why the bench ended early, where it did; the rows are those that were measured before."""
    data = {"bench": bench, "rows": [asdict(row) for row in rows]}
    return data if error is None else {**data, "error": error}


def print_rows(title: str, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("case", "peer", "ours", "times better", "goal", "holds"):
        table.add_column(name, justify="left" if name in ("case", "goal", "holds") else "right")
    for row in rows:
        table.add_row(row.case, _n(row.peer), _n(row.ours), _n(row.ratio), row.goal, "yes" if row.holds else "NO")
    Console(highlight=False).print(table)


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
