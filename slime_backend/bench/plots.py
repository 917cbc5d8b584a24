"""`draw` plots a bench's rows: a line for the peer and one for ours, over a number in the cases' names."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.bench.rows import Row

PEER_COLOUR, OUR_COLOUR = "#c44e52", "#4c72b0"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot is one SVG with logarithmic axes; bars show the middle half of the rounds.

    `cases`: a pattern that matches the complete text of its cases; its group `x` is the number.
    """

    name: str
    title: str
    x: str
    y: str
    cases: str
    peer: str
    ours: str


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def points(plot: Plot, rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """Return (x, row) of the plot's cases, sorted by x."""
    found = [(match, row) for row in rows if (match := re.fullmatch(plot.cases, row.case))]
    return sorted(((float(match["x"]), row) for match, row in found), key=lambda point: point[0])


def draw(plot: Plot, rows: Sequence[Row], path: Path) -> bool:
    """Write the SVG; False, and nothing, where fewer than two rows match. The same rows give the same
    bytes. Needs matplotlib."""
    found = points(plot, rows)
    if len(found) < 2:
        return False
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator, ScalarFormatter

    # Text stays text, so that it is searchable and the file small; fixed ids and no date keep it the same.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes: Any = figure.add_subplot()
        for name, colour, side, around in (
            (plot.peer, PEER_COLOUR, "peer", "peer_spread"),
            (plot.ours, OUR_COLOUR, "ours", "our_spread"),
        ):
            line = [(x, getattr(row, side), getattr(row, around)) for x, row in found if getattr(row, side) is not None]
            if not line:
                continue
            xs, ys = [x for x, _, _ in line], [y for _, y, _ in line]
            bars = [[y - (s[0] if s else y) for _, y, s in line], [(s[1] if s else y) - y for _, y, s in line]]
            axes.errorbar(xs, ys, bars, label=name, color=colour, marker="o", markersize=4, capsize=3)
        axes.set(xscale="log", yscale="log", xlabel=plot.x, ylabel=plot.y)
        axes.set_title(plot.title, loc="left", fontsize=11)
        ticks = sorted({x for x, _ in found})
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True
