"""The report's charts as Plotly figures: plain dictionaries of `data` and `layout`, drawn by plotly.js in the page.

Every text that comes from the run is escaped here: Plotly reads a part of HTML in labels and hover texts.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from slime_backend.audit.differences import PER_DECADE, upper_edge
from slime_backend.report import palette
from slime_backend.report.hit_rate import HitRate

Figure = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
MARKED_VERSIONS = 24  # labels on the axis of versions


def reward(steps: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Mean reward per step, with one standard deviation of the batch around it."""
    rows = [s for s in steps if _number(s.get("reward_mean")) is not None]
    if not rows:
        return None
    x = [s.get("step", i) for i, s in enumerate(rows, 1)]
    mean = [float(s["reward_mean"]) for s in rows]
    std = [_number(s.get("reward_std")) or 0.0 for s in rows]
    edge = [m + d for m, d in zip(mean, std, strict=True)] + [m - d for m, d in zip(mean, std, strict=True)][::-1]
    band = {
        "type": "scatter",
        "x": x + x[::-1],
        "y": edge,
        "mode": "lines",  # a short one would get markers
        "fill": "toself",
        "fillcolor": "rgba(47,93,138,0.12)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": "± one standard deviation",
    }
    line = _step_line(x, mean, "mean of the batch", "%{y:.3f}")
    layout = base_layout("training step", "reward", height=300)
    layout["xaxis"] |= _whole_ticks(len(rows))
    return {"data": [band, line], "layout": layout}


def lag(steps: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Version lag of each step's batch: mean over tokens, and the largest."""
    rows = [s for s in steps if _number(s.get("lag_mean")) is not None]
    if not rows:
        return None
    x = [s.get("step", i) for i, s in enumerate(rows, 1)]
    largest = {
        "type": "bar",
        "x": x,
        "y": [s.get("lag_max") for s in rows],
        "marker": {"color": "#dfe6ee"},
        "name": "largest",
        "hovertemplate": "step %{x}: at most %{y}<extra></extra>",
    }
    mean = _step_line(x, [float(s["lag_mean"]) for s in rows], "mean over tokens", "%{y:.2f} on average")
    layout = base_layout("training step", "versions behind the trainer", height=300)
    layout["xaxis"] |= _whole_ticks(len(rows))
    layout["yaxis"] |= {"rangemode": "tozero", **_whole_ticks(max(_number(s.get("lag_max")) or 0 for s in rows))}
    return {"data": [largest, mean], "layout": layout}


def _step_line(x: Sequence[Any], y: Sequence[float], name: str, hover: str) -> dict[str, Any]:
    """A line over training steps; `hover` is the text over a step."""
    return {
        "type": "scatter",
        "x": x,
        "y": y,
        "mode": "lines+markers",
        "line": {"color": palette.ACCENT, "width": 2},
        "marker": {"size": 5},
        "name": name,
        "hovertemplate": f"step %{{x}}: {hover}<extra></extra>",
    }


def hit_rate(rates: HitRate, versions: Sequence[str]) -> Figure | None:
    """Share of prompt tokens found in the radix cache, engine by engine; a line at each publication."""
    engines = rates.engines
    if not engines:
        return None
    data = []
    for number, engine in enumerate(engines):
        points = rates.course(engine, versions)
        data.append(
            {
                "type": "scatter",
                "x": [round(p.x, 4) for p in points],
                "y": [round(p.rate, 5) for p in points],
                "text": [_hit_text(p.version, p.first, p.last, p.tokens) for p in points],
                "mode": "lines+markers",
                "line": {"color": palette.engine_colour(number), "width": 1.5},
                "marker": {"size": 4},
                "name": html.escape(engine),
                "hovertemplate": "%{text}<br>%{y:.1%} found in the cache<extra>%{fullData.name}</extra>",
            }
        )
    layout = base_layout("weight version served; within one, admissions in their order", "hit rate", height=320)
    every = max(1, -(-len(versions) // MARKED_VERSIONS))
    layout["xaxis"] |= {
        "tickvals": list(range(0, len(versions), every)),
        "ticktext": [html.escape(v) for v in versions[::every]],
        "showgrid": False,
        "range": [-0.2, len(versions) + 0.2],
    }
    layout["yaxis"] |= {"tickformat": ".0%", "range": [-0.03, 1.05]}
    layout["shapes"] = [
        {
            "type": "line",
            "x0": place,
            "x1": place,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": "#b9c2cc", "width": 1, "dash": "dot"},
            "layer": "below",
        }
        for place in range(1, len(versions))
    ]
    return {"data": data, "layout": layout}


def _hit_text(version: str, first: int, last: int, tokens: int) -> str:
    which = "first admission" if last == 0 else f"admissions {first}..{last}"
    return f"{html.escape(version)}, {which}, {tokens:,} tokens of prompts"


KIND_NAMES = {
    "own": "own KV, at the first go",
    "recomputed": "own KV, computed again",
    "carried": "KV of other versions",
}


def differences(audit: Mapping[str, Any] | None) -> Figure | None:
    """How far recomputed log-probs are from recorded ones, by kind of span; a line at the tolerance."""
    kinds = (audit or {}).get("differences") or {}
    data = []
    for number, (kind, found) in enumerate(kinds.items()):
        counts = found["bins"]
        data.append(
            {
                "type": "bar",
                "x": [upper_edge(i) / 10 ** (0.5 / PER_DECADE) for i in range(len(counts))],  # the middle of the bin
                "y": counts,
                "width": [upper_edge(i) - upper_edge(i - 1) for i in range(len(counts))],
                "marker": {"color": palette.engine_colour(number), "line": {"width": 0}},
                "opacity": 0.75,
                "name": html.escape(KIND_NAMES.get(kind, kind)),
                "hovertemplate": "about %{x:.1e}: %{y:,} tokens<extra>%{fullData.name}</extra>",
            }
        )
    if not data or audit is None:
        return None
    layout = base_layout("|difference of log-prob|; the first bar holds all below", "tokens", height=300)
    layout["barmode"] = "stack"
    layout["bargap"] = 0
    layout["xaxis"] |= {"type": "log", "exponentformat": "power", "dtick": 1}
    tolerance = _number(audit.get("tolerance"))
    if tolerance:
        layout["shapes"] = [
            {
                "type": "line",
                "x0": tolerance,
                "x1": tolerance,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": palette.BAD, "width": 1.5, "dash": "dot"},
            }
        ]
    return {"data": data, "layout": layout}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole_ticks(span: float, most: int = 8) -> dict[str, Any]:
    """Ticks of an axis that counts: at whole numbers, at most about so many."""
    distance = next(d for power in range(12) for d in (10**power, 2 * 10**power, 5 * 10**power) if span / d <= most)
    return {"tick0": 0, "dtick": distance}


def base_layout(x: str, y: str, *, height: int) -> dict[str, Any]:
    axis = {"gridcolor": palette.LINE, "linecolor": palette.LINE, "zeroline": False, "automargin": True}
    title = {"font": {"size": 12, "color": palette.MUTED}, "standoff": 10}
    return {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 34, "b": 48},
        "font": {"family": FONT, "size": 12, "color": palette.INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {**axis, "title": {**title, "text": x}},
        "yaxis": {**axis, "title": {**title, "text": y}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "hovermode": "closest",
        "dragmode": "zoom",
    }
