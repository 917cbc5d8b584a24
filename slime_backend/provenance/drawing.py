"""Draws one rollout's spans over a token ruler, as text: the sampled spans, then the KV that each segment came from.

row "tokens"   positions over prompt + output, the prompt shortened where it is long
row "sampled"  which version sampled each output token
row "KV n"     for segment n, which version had computed the KV of each position that its tokens were sampled from
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import Span

LABEL = 10  # width of the first column
PROMPT_WIDTH = 28
OUTPUT_WIDTH = 56


@dataclass(frozen=True, slots=True)
class _Ruler:
    """Maps positions to columns: the prompt on its own scale, so that a long one leaves room for the output."""

    prompt: int
    output: int

    @property
    def prompt_width(self) -> int:
        return min(PROMPT_WIDTH, max(1, self.prompt))

    @property
    def output_width(self) -> int:
        return min(OUTPUT_WIDTH, max(1, self.output))

    @property
    def width(self) -> int:
        return self.prompt_width + self.output_width

    def column(self, position: int) -> int:
        """Of a position over prompt + output; the end of the output is the ruler's width."""
        if position <= self.prompt:
            return position * self.prompt_width // max(1, self.prompt)
        return self.prompt_width + (position - self.prompt) * self.output_width // max(1, self.output)


def draw(record: RolloutRecord) -> str:
    """The drawing, without a trailing newline; at most `LABEL + PROMPT_WIDTH + OUTPUT_WIDTH` columns wide."""
    ruler = _Ruler(len(record.prompt_ids), len(record.output_ids))
    shift = len(record.prompt_ids)
    sampled = [Span(s.version, s.start + shift, s.end + shift) for s in record.spans]
    rows = [
        _row("", _scale(ruler)),
        _row("tokens", _bar([Span("prompt", 0, shift), Span("output", shift, shift + ruler.output)], ruler, "┌─┐")),
        _row("sampled", _bar(sampled, ruler, "├─┤")),
    ]
    for number, segment in enumerate(record.segments, 1):
        # The KV of a segment's last token is computed with the next one, so a context ends one position early.
        rows.append(
            _row(f"KV {number}", _bar(segment.context, ruler, "└─┘")) + f"  tokens {segment.start}..{segment.end}"
        )
    return "\n".join(rows)


def _row(label: str, cells: str) -> str:
    return f"{label:<{LABEL}}{cells}".rstrip()


def _scale(ruler: _Ruler) -> str:
    """Positions at the start, at the end of the prompt, and at the end; those that fit."""
    cells = [" "] * (ruler.width + 8)
    end = 0
    for position in (0, ruler.prompt, ruler.prompt + ruler.output):
        text, start = str(position), ruler.column(position)
        if start >= end:
            cells[start : start + len(text)] = text
            end = start + len(text) + 1
    return "".join(cells)


def _bar(spans: tuple[Span, ...] | list[Span], ruler: _Ruler, ends: str) -> str:
    """Each span as `├─ v3 ──┤`; one too short for its name shows what fits of it."""
    left, line, right = ends[0], ends[1], ends[2]
    cells = [" "] * ruler.width
    for span in spans:
        start, end = ruler.column(span.start), max(ruler.column(span.end), ruler.column(span.start) + 1)
        room = min(end, ruler.width) - start
        if room <= 2:
            text = span.version[:room]
        else:
            name = f"{line} {span.version} " if room >= len(span.version) + 5 else span.version[: room - 2]
            text = left + name.ljust(room - 2, line) + right
        cells[start : start + room] = text.ljust(room, line)[:room]
    return "".join(cells)
