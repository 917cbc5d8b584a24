"""Every bench prints these rows: one per case, with the peer's figure, ours, and whether the goal holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slime_backend.errors import ReefError

Spread = tuple[float, float]  # the middle half of the rounds: a quarter of them lies below it, a quarter above


class BenchError(ReefError, RuntimeError):
    """A bench can't measure what it should; the message is one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row is one case's figures.

    `ratio`: how many times better ours is than the peer, in the case's own cost (tokens computed, seconds, slots);
    None where nothing is compared. The spreads are given where `peer` and `ours` are medians over rounds.
    """

    case: str
    peer: float | None
    ours: float
    ratio: float | None
    goal: str
    holds: bool
    peer_spread: Spread | None = None
    our_spread: Spread | None = None


def ratio(peer_cost: float, our_cost: float) -> float | None:
    return round(peer_cost / our_cost, 2) if our_cost else None


def cost_row(
    case: str,
    peer: Sequence[float] | None,
    ours: Sequence[float],
    *,
    at_least: float | None = None,
    below: float | None = None,
) -> Row:
    """Make the row of a cost (less is better): medians over the rounds, their ratio, the middle half of the rounds.

    The goal: `at_least` so many times less than the peer, or `below` so much; without either there is none.
    """
    our_median = statistics.median(ours)
    peer_median = None if peer is None else statistics.median(peer)
    times = None if peer_median is None else ratio(peer_median, our_median)
    goal, holds = "-", True
    if at_least is not None:
        goal, holds = f"at least {at_least:g} times", times is not None and times >= at_least
    if below is not None:
        goal, holds = f"under {below:g}", our_median < below
    return Row(
        case,
        None if peer_median is None else short(peer_median),
        short(our_median),
        times,
        goal,
        holds,
        None if peer is None else spread(peer),
        spread(ours),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Return the middle half of the rounds; None for fewer than three."""
    if len(values) < 3:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return short(low), short(high)


def short(value: float) -> float:
    """Round to four digits, more than any of these measurements is precise to."""
    return float(f"{value:.4g}")


def format_row(row: Row) -> str:
    """Format a row as one log line."""
    times = "" if row.ratio is None else f", ratio {row.ratio}"
    return f"{row.case}: peer {row.peer}, ours {row.ours}{times} ({'holds' if row.holds else 'MISSED'}: {row.goal})"


def report_rows(found: Sequence[Row], rows: list[Row], log: Callable[[str], None]) -> None:
    """Add new rows to the bench's, and log them."""
    for row in found:
        rows.append(row)
        log(format_row(row))


def row_json(row: Row) -> dict[str, Any]:
    """Return the six fields of the contract, and the spreads where there are some."""
    return {name: v for name, v in asdict(row).items() if v is not None or name in ("peer", "ratio")}


def to_json(bench: str, rows: Sequence[Row], error: str | None = None) -> dict[str, Any]:
    """Return a bench's rows as JSON. `error`: why it ended early, where it did; the rows were measured before."""
    data = {"bench": bench, "rows": [row_json(row) for row in rows]}
    return data if error is None else {**data, "error": error}


COLUMNS = ("case", "peer", "ours", "times better", "goal", "holds")


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of COLUMNS, for the terminal and a page."""
    peer, ours = number(row.peer, row.peer_spread), number(row.ours, row.our_spread)
    return row.case, peer, ours, number(row.ratio), row.goal, "yes" if row.holds else "NO"


def print_rows(title: str, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("case", "goal", "holds") else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(highlight=False).print(table)


def number(value: float | None, around: Spread | None = None) -> str:
    if value is None:
        return "-"
    return _plain(value) + ("" if around is None else f" ({_plain(around[0])} .. {_plain(around[1])})")


def _plain(value: float) -> str:
    """Format with four digits and no exponent."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
