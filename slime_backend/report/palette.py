"""The report's colours, in one place: quiet on a light ground, distinct by lightness as well."""

from __future__ import annotations

from collections.abc import Sequence

INK, MUTED, FAINT, LINE = "#1f2733", "#5d6776", "#8b94a1", "#e3e6ea"
GOOD, WARNING, BAD = "#1f7a4d", "#9a6a00", "#b3261e"
ACCENT = "#2f5d8a"
ENGINES = ("#2f5d8a", "#c0703a", "#4d8a6f", "#8a5a97", "#a08a2f", "#6b7785")
PHASES = {  # in the order in which they happen
    "pause": "#33475f",
    "flush": "#4f86b5",
    "verify": "#9cc3e0",
    "load": "#e0a458",
    "label": "#b9c2cc",
    "resume": "#6fae8c",
}
VERSIONS = ("#a9c7e8", "#f2c9a1", "#b5dcc3", "#d9c3e6", "#f0dc9a", "#f3bcc0", "#b8dfe3", "#d2d6dc")


def engine_colour(number: int) -> str:
    return ENGINES[number % len(ENGINES)]


def version_colours(versions: Sequence[str]) -> dict[str, str]:
    """Neighbours in the order of publication differ; the colours come round again after eight."""
    return {version: VERSIONS[i % len(VERSIONS)] for i, version in enumerate(versions)}
