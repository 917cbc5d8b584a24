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
from pathlib import Path
from string import Template
from typing import Any

from slime_backend.report import palette
from slime_backend.report.charts import FONT
from slime_backend.report.sections import esc


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the page: text from `sections`, a figure, or both."""

    key: str  # names its element
    title: str
    note: str = ""  # a sentence on how to read it; plain text
    body: str = ""  # HTML
    figure: Mapping[str, Any] | None = None
    half: bool = False  # two of these stand side by side


STATIC = Path(__file__).parent / "static"
DRAW = (STATIC / "draw.js").read_text()
PAGE = Template((STATIC / "page.html").read_text())
# What the style sheet knows by name.
VARIABLES = {
    "ink": palette.INK,
    "muted": palette.MUTED,
    "line": palette.LINE,
    "faint": palette.FAINT,
    "good": palette.GOOD,
    "warning": palette.WARNING,
    "bad": palette.BAD,
    "font": FONT,
}
STYLE = (
    f":root {{ {' '.join(f'--{name}: {value};' for name, value in VARIABLES.items())} }}\n"
    + (STATIC / "page.css").read_text()
)


def page(
    *, title: str, subtitle: str, verdict: str, cards: str, sections: Sequence[Section], footer: str, plotly: str
) -> str:
    """The whole file. `verdict` and `cards` are HTML; the other texts are plain; `plotly` is the library's source."""
    figures = {f"chart-{s.key}": s.figure for s in sections if s.figure is not None}
    policy = (
        f"default-src 'none'; script-src {_source(plotly)} {_source(DRAW)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return PAGE.substitute(
        policy=policy,
        title=esc(title),
        subtitle=esc(subtitle),
        style=STYLE,
        verdict=verdict,
        cards=cards,
        sections=_sections(sections),
        footer=esc(footer),
        figures=_json(figures),
        plotly=plotly,
        draw=DRAW,
    )


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
