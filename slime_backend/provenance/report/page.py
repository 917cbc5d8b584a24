"""The page around the pieces: one HTML file, its scripts inside it, and a policy that forbids it the network.

The Content-Security-Policy names the page's own two scripts by their hashes, so nothing else can run or be loaded,
whatever text a run contains.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend.provenance.report import palette
from slime_backend.provenance.report.charts import FONT
from slime_backend.provenance.report.sections import esc


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the page: text from `sections`, a figure, or both."""

    key: str  # names its element
    title: str
    note: str = ""  # a sentence on how to read it; plain text
    body: str = ""  # HTML
    figure: Mapping[str, Any] | None = None
    half: bool = False  # two of these stand side by side


DRAW = """
const charts = JSON.parse(document.getElementById("figures").textContent);
const config = {displayModeBar: false, responsive: true, doubleClick: "reset"};
for (const [id, figure] of Object.entries(charts)) {
  Plotly.newPlot(id, figure.data, figure.layout, config);
}
"""

STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f6f7f8; color: {palette.INK}; font: 15px/1.5 {FONT}; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 30px 28px 60px; }}
header h1 {{ font-size: 26px; font-weight: 650; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }}
header p {{ margin: 4px 0 20px; color: {palette.MUTED}; }}
h2 {{ font-size: 17px; font-weight: 650; margin: 0 0 2px; }}
h3 {{ font-size: 14px; font-weight: 500; margin: 0; color: {palette.MUTED}; }}
p {{ margin: 6px 0; }}
code {{ font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; }}
section {{ background: #fff; border: 1px solid {palette.LINE}; border-radius: 10px; padding: 18px 22px;
  margin: 0 0 16px; min-width: 0; }}
.note {{ color: {palette.MUTED}; font-size: 13.5px; max-width: 90ch; }}
.verdict {{ border-left: 6px solid {palette.FAINT}; padding: 20px 24px; }}
.verdict h2 {{ font-size: 22px; margin-bottom: 8px; }}
.verdict.good {{ border-left-color: {palette.GOOD}; background: #f3faf6; }}
.verdict.good h2 {{ color: {palette.GOOD}; }}
.verdict.warning {{ border-left-color: {palette.WARNING}; background: #fdf9ee; }}
.verdict.warning h2 {{ color: {palette.WARNING}; }}
.verdict.bad {{ border-left-color: {palette.BAD}; background: #fdf3f2; }}
.verdict.bad h2 {{ color: {palette.BAD}; }}
.verdict ul {{ list-style: none; margin: 0; padding: 0; }}
.verdict li {{ padding: 2px 0 2px 26px; position: relative; overflow-wrap: anywhere; }}
.verdict li::before {{ position: absolute; left: 2px; font-weight: 700; }}
.verdict li.good::before {{ content: "✓"; color: {palette.GOOD}; }}
.verdict li.warning::before {{ content: "!"; color: {palette.WARNING}; left: 6px; }}
.verdict li.bad::before {{ content: "✗"; color: {palette.BAD}; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 12px; margin: 0 0 16px; }}
.card {{ background: #fff; border: 1px solid {palette.LINE}; border-radius: 10px; padding: 12px 16px; }}
.card b {{ display: block; font-size: 21px; font-weight: 650; font-variant-numeric: tabular-nums; }}
.card span {{ color: {palette.MUTED}; font-size: 13px; line-height: 1.3; display: block; }}
.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }}
@media (max-width: 860px) {{ .pair {{ grid-template-columns: 1fr; gap: 0; }} }}
table {{ border-collapse: collapse; font-size: 13.5px; width: 100%; margin-top: 8px; }}
table.narrow {{ width: auto; min-width: 420px; }}
th, td {{ text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-top: 1px solid {palette.LINE};
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }}
tr:first-child > * {{ border-top: 0; }}
th {{ font-weight: 500; color: {palette.MUTED}; }}
.listed td:first-child {{ font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; }}
.listed {{ margin-top: 6px; }}
#audit h3 {{ margin-top: 14px; }}
.figures {{ columns: 2 420px; column-gap: 40px; font-size: 13.5px; margin-top: 8px; }}
.figures div {{ break-inside: avoid; display: grid; grid-template-columns: 280px 1fr; gap: 12px; padding: 3px 0;
  border-bottom: 1px solid {palette.LINE}; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }}
.figures span {{ color: {palette.MUTED}; }}
.rollout {{ border-top: 1px solid {palette.LINE}; padding: 12px 0 8px; }}
.class {{ display: inline-block; background: #eef2f6; color: {palette.INK}; border-radius: 5px; padding: 1px 8px;
  margin-right: 6px; font-weight: 650; }}
.facts {{ color: {palette.MUTED}; font-size: 13.5px; overflow-wrap: anywhere; }}
.found {{ color: {palette.BAD}; font-weight: 600; overflow-wrap: anywhere; }}
svg.spans {{ width: 100%; height: auto; display: block; }}
svg.spans text {{ font-family: {FONT}; fill: {palette.INK}; font-size: 12px; }}
svg.spans text.row {{ fill: {palette.MUTED}; }}
svg.spans text.note {{ fill: {palette.MUTED}; font-size: 11.5px; }}
footer {{ color: {palette.MUTED}; font-size: 13px; }}
@media print {{ body {{ background: #fff; }} section, .card {{ break-inside: avoid; }} }}
"""


def page(
    *, title: str, subtitle: str, verdict: str, cards: str, sections: Sequence[Section], footer: str, plotly: str
) -> str:
    """The whole file. `verdict` and `cards` are HTML; the other texts are plain; `plotly` is the library's source."""
    figures = {f"chart-{s.key}": s.figure for s in sections if s.figure is not None}
    policy = (
        f"default-src 'none'; script-src {_source(plotly)} {_source(DRAW)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{esc(title)}</h1><p>{esc(subtitle)}</p></header>
{verdict}
<div class="cards">{cards}</div>
{_sections(sections)}
<footer>{esc(footer)}</footer>
</main>
<script type="application/json" id="figures">{_json(figures)}</script>
<script>{plotly}</script>
<script>{DRAW}</script>
</body>
</html>
"""


def _sections(sections: Sequence[Section]) -> str:
    """In order; neighbours that are `half` share a row."""
    text, open_pair = [], False
    for section in sections:
        if section.half != open_pair:
            text.append('<div class="pair">' if section.half else "</div>")
            open_pair = section.half
        text.append(_section(section))
    return "\n".join([*text, "</div>"] if open_pair else text)


def _section(section: Section) -> str:
    note = f'<p class="note">{esc(section.note)}</p>' if section.note else ""
    chart = f'<div class="chart" id="chart-{esc(section.key)}"></div>' if section.figure is not None else ""
    return f'<section id="{esc(section.key)}"><h2>{esc(section.title)}</h2>{note}{chart}{section.body}</section>'


def _json(data: Any) -> str:
    """JSON that can stand inside a script element: no text in it can end the element. JSON has no NaN: null."""
    return json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _source(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
