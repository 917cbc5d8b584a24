"""This writes the plots of a plan as one HTML file, in the report's page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_backend.planner.plan import Plan
from slime_backend.planner.predict import Prediction, predict
from slime_backend.planner.recommend import GROUPS, PERIODS, At, Crossover, by_group, by_period
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import PlanError
from slime_backend.planner.work import MODES
from slime_backend.report import palette
from slime_backend.report.charts import base_layout
from slime_backend.report.page import Section, page
from slime_backend.report.sections import esc
from slime_backend.report.write import plotly_source

SLIME_DASH = {"drop": "dot", "requeue": "dot"}
HIGHEST = 1e3  # prefilled tokens for each finished one; higher values are not drawn


def write_page(plan: Plan, path: Path) -> None:
    """Write the page. Raises ReportError without plotly, PlanError where the file can't be written."""
    library = plotly_source()
    try:
        path.write_text(compose(plan, library), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path} can't be written ({error.strerror}); give --page another file") from error


def compose(plan: Plan, plotly: str) -> str:
    """Return the page. `plotly`: the source of plotly.js."""
    listed = "".join(f"<li>{esc(line)}</li>" for line in plan.lines())
    period, group = by_period(plan.traffic), by_group(plan.traffic)
    throughput: Callable[[Prediction], float] = lambda p: p.tokens_per_s  # noqa: E731
    prefilled: Callable[[Prediction], float] = lambda p: p.prefilled_per_token  # noqa: E731
    every, of_each = "seconds between two publications", "requests of each prompt"
    return page(
        title="Plan",
        subtitle=plan.format_traffic(),
        verdict=f"<section><h2>{esc(plan.recommendation.mode)}</h2><ul>{listed}</ul></section>",
        cards="",
        sections=[
            Section(
                "throughput",
                "Finished tokens per second",
                "A dashed line: from there on another mode is recommended. Dotted curves are slime's abort.",
                figure=chart(PERIODS, period, plan.speeds, throughput, (every, "tokens/s"), plan.by_period, log=True),
            ),
            Section(
                "prefilled",
                "Prefilled tokens for each finished one",
                figure=chart(
                    PERIODS, period, plan.speeds, prefilled, (every, "tokens"), plan.by_period, log=True, log_y=True
                ),
            ),
            Section(
                "group",
                "By the size of a group",
                figure=chart(GROUPS, group, plan.speeds, throughput, (of_each, "tokens/s"), plan.by_group),
            ),
        ],
        footer="Predictions of reef-slime plan; docs/planner.md has the formulas. The file needs no network.",
        plotly=plotly,
    )


def chart(
    points: Sequence[float],
    at: At,
    speeds: Speeds,
    value: Callable[[Prediction], float],
    axes: tuple[str, str],
    crossed: Sequence[Crossover],
    *,
    log: bool = False,
    log_y: bool = False,
) -> dict[str, Any]:
    """Draw one curve per mode; where a value is infinite or too high to draw, a gap."""
    data = []
    for number, mode in enumerate(MODES):
        values = [value(predict(mode, at(x), speeds)) for x in points]
        line = {"color": palette.engine_colour(number), "width": 2, "dash": SLIME_DASH.get(mode, "solid")}
        drawn = [round(v, 4) if v <= HIGHEST or (math.isfinite(v) and not log_y) else None for v in values]
        data.append({"type": "scatter", "mode": "lines", "name": mode, "x": list(points), "y": drawn, "line": line})
    layout = base_layout(*axes, height=360)
    if log:
        layout["xaxis"]["type"] = "log"
    if log_y:
        layout["yaxis"]["type"] = "log"
    layout["shapes"] = [
        {
            "type": "line",
            "x0": c.at,
            "x1": c.at,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": palette.FAINT, "width": 1.5, "dash": "dash"},
        }
        for c in crossed
    ]
    layout["annotations"] = [
        {
            "x": math.log10(c.at) if log else c.at,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "showarrow": False,
            "text": f"{c.below} → {c.above} at {c.at:.3g}",
            "font": {"size": 11, "color": palette.MUTED},
        }
        for c in crossed
    ]
    return {"data": data, "layout": layout}
