"""One rollout's spans as SVG over a token ruler; the drawing of drawing.py for the eye.

row "sampled"  which version sampled each output token
row "KV n"     for segment n, which version had computed the KV of each position; the stroke under it marks the tokens
               that were sampled from it
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_backend.provenance.records import RolloutRecord
from slime_backend.report import palette
from slime_backend.wire import Span

WIDTH, LEFT, RIGHT = 1040, 74, 116  # of the drawing, of its row names, of the text after a row (user units)
ROW, BAR = 27, 17
PROMPT_SHARE = 0.33  # at most; a long prompt is drawn shorter so that the output has room
LETTER = 7.0  # width of one, about
DRAWN_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class _Ruler:
    prompt: int
    output: int

    @property
    def split(self) -> float:
        """Where the output begins, in user units."""
        share = min(PROMPT_SHARE, self.prompt / max(1, self.prompt + self.output))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def x(self, position: int) -> float:
        """Of a position over prompt + output."""
        if position <= self.prompt:
            return LEFT + (self.split - LEFT) * position / max(1, self.prompt)
        return self.split + (WIDTH - RIGHT - self.split) * (position - self.prompt) / max(1, self.output)


def draw_svg(record: RolloutRecord, colours: Mapping[str, str]) -> str:
    """An <svg> element; every text in it is escaped."""
    ruler = _Ruler(len(record.prompt_ids), len(record.output_ids))
    shift = ruler.prompt
    segments = record.segments[:DRAWN_SEGMENTS]
    parts = [*_scale(ruler)]
    y = 22.0
    sampled = [Span(s.version, s.start + shift, s.end + shift) for s in record.spans]
    parts += _row("sampled", y, sampled, ruler, colours)
    for number, segment in enumerate(segments, 1):
        y += ROW
        parts += _row(f"KV {number}", y, segment.context, ruler, colours)
        start, end = ruler.x(segment.start + shift), ruler.x(segment.end + shift)
        parts.append(
            f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y + BAR + 3:.1f}" y2="{y + BAR + 3:.1f}" '
            f'stroke="{palette.INK}" stroke-width="2"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 10, y + 13, f"tokens {segment.start}..{segment.end}", "note"))
    if len(record.segments) > DRAWN_SEGMENTS:
        y += ROW
        parts.append(_text(LEFT, y + 13, f"and {len(record.segments) - DRAWN_SEGMENTS} more segments", "note"))
    height = y + ROW
    parts.append(
        f'<line x1="{ruler.split:.1f}" x2="{ruler.split:.1f}" y1="16" y2="{height - 4:.1f}" '
        f'stroke="{palette.FAINT}" stroke-dasharray="2 3"/>'
    )
    return (
        f'<svg class="spans" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="spans of rollout {html.escape(record.receipt)}">{"".join(parts)}</svg>'
    )


def _row(name: str, y: float, spans: Sequence[Span], ruler: _Ruler, colours: Mapping[str, str]) -> list[str]:
    parts = [_text(0, y + 13, name, "row")]
    for span in spans:
        start, end = ruler.x(span.start), max(ruler.x(span.end), ruler.x(span.start) + 1)
        colour = colours.get(span.version, palette.LINE)
        parts.append(
            f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" height="{BAR}" fill="{colour}" '
            f'stroke="#fff"><title>{html.escape(span.version)}, positions {span.start}..{span.end}</title></rect>'
        )
        if end - start >= LETTER * len(span.version) + 6:
            parts.append(_text(start + 5, y + 13, span.version, "version"))
    return parts


def _scale(ruler: _Ruler) -> list[str]:
    """What stands above the rows: where prompt and output begin, and their lengths."""
    parts = [_text(ruler.split + 2, 11, f"output, {ruler.output} tokens", "note")]
    text = f"prompt, {ruler.prompt} tokens"
    if ruler.split - LEFT > LETTER * len(text):
        parts.append(_text(LEFT + 2, 11, text, "note"))
    return parts


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{html.escape(text)}</text>'
