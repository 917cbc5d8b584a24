"""Publications drawn over time: along the whole run, and each one by itself from its pause to the last resume.

A report has each step's duration on each engine. Steps begin on all engines at once, when the slowest has ended the
one before (publication/transaction.py), so a step begins where the longest of the step before ends.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend.report import palette
from slime_backend.report.charts import Figure, base_layout

STEPS = tuple(palette.PHASES)
DRAWN = 16  # publications drawn one by one
ROW_PX = 17


@dataclass(frozen=True, slots=True)
class Bar:
    engine: str
    version: str
    step: str
    start: float  # ms since the publication's pause
    ms: float
    failed: bool  # the engine failed at this step


def bars(publication: Mapping[str, Any]) -> list[Bar]:
    """One per engine and step that was reached."""
    start, found = 0.0, []
    engines = publication.get("engines") or []
    for step in STEPS:
        took = [e.get(f"{step}_ms") for e in engines]
        for engine, ms in zip(engines, took, strict=True):
            if ms is not None:
                failed = engine.get("failed_step") == step
                found.append(Bar(str(engine.get("engine")), str(publication.get("version")), step, start, ms, failed))
        start += max((ms for ms in took if ms is not None), default=0.0)
    return found


def along_the_run(publications: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A lane per engine over the seconds of the run; what is not covered is generation."""
    dated = [p for p in publications if isinstance(p.get("started_at"), int | float)]
    if not dated:
        return None
    zero = min(p["started_at"] for p in dated)
    drawn = []
    for publication in dated:
        # The pause comes once the bytes are made ready.
        offset = publication["started_at"] - zero + (publication.get("prepare_ms") or 0.0) / 1000
        drawn += [(bar, offset) for bar in bars(publication)]
    if not drawn:
        return None
    lanes = sorted({bar.engine for bar, _ in drawn}, reverse=True)
    data = [
        {
            **_bar_trace(step, [bar for bar, _ in drawn if bar.step == step]),
            "y": [html.escape(bar.engine) for bar, _ in drawn if bar.step == step],
            "base": [round(offset + bar.start / 1000, 4) for bar, offset in drawn if bar.step == step],
            "x": [round(bar.ms / 1000, 5) for bar, _ in drawn if bar.step == step],
        }
        for step in STEPS
    ]
    layout = base_layout("seconds since the first publication", "", height=130 + 34 * len(lanes))
    layout |= {"barmode": "overlay", "bargap": 0.35}
    layout["yaxis"] |= {"showgrid": False, "categoryorder": "array", "categoryarray": [html.escape(n) for n in lanes]}
    return {"data": data, "layout": layout}


def chosen(publications: Sequence[Mapping[str, Any]], room: int = DRAWN) -> list[Mapping[str, Any]]:
    """All where they fit; else those with an unconfirmed engine, then the slowest, in the order of the run."""
    if len(publications) <= room:
        return list(publications)

    def weight(publication: Mapping[str, Any]) -> tuple[bool, float]:
        unconfirmed = any(not e.get("confirmed") for e in publication.get("engines") or [])
        return unconfirmed, publication.get("wall_ms") or 0.0

    places = sorted(range(len(publications)), key=lambda i: weight(publications[i]), reverse=True)[:room]
    return [publications[i] for i in sorted(places)]


def one_by_one(publications: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A row per publication and engine, over the milliseconds since its pause."""
    drawn = [bar for publication in publications for bar in bars(publication)]
    if not drawn:
        return None
    rows = list(dict.fromkeys(_row(bar) for bar in drawn))
    data = [
        {
            **_bar_trace(step, some),
            "y": [_row(bar) for bar in some],
            "base": [round(bar.start, 3) for bar in some],
            "x": [round(bar.ms, 3) for bar in some],
        }
        for step in STEPS
        for some in [[bar for bar in drawn if bar.step == step]]
    ]
    layout = base_layout("milliseconds since the pause was sent", "", height=110 + ROW_PX * len(rows))
    layout |= {"barmode": "overlay", "bargap": 0.25}
    layout["yaxis"] |= {
        "showgrid": False,
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "tickfont": {"size": 11},
        "tickmode": "array",
        "tickvals": rows,
        "ticktext": rows,
    }
    return {"data": data, "layout": layout}


def _row(bar: Bar) -> str:
    return html.escape(f"{bar.version} · {bar.engine}")


def _bar_trace(step: str, some: Sequence[Bar]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": step,
        "marker": {
            "color": palette.PHASES[step],
            "line": {"color": palette.BAD, "width": [2 if bar.failed else 0 for bar in some]},
        },
        "text": [
            f"{html.escape(bar.version)} on {html.escape(bar.engine)}: {step} {bar.ms:.1f} ms"
            + (", failed here" if bar.failed else "")
            for bar in some
        ],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }
