"""The pieces of the page that are plain HTML. Every text from the run goes through `esc`."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_backend.command_line import command
from slime_backend.provenance.records import RolloutRecord
from slime_backend.report.charts import KIND_NAMES
from slime_backend.report.span_svg import draw_svg
from slime_backend.report.verdict import Verdict

SHOWN_VIOLATIONS = 20
SHOWN_FINDINGS = 12
QUESTION_CHARACTERS = 160
CLASS_MEANING = {
    "pure": "one version sampled every token and computed all of its KV",
    "recomputed": "its KV was taken away and computed again; one version sampled it",
    "mixed": "several versions sampled it, each from KV of its own",
    "carried": "some token was sampled from KV that another version had computed",
}


def esc(value: object) -> str:
    """Text for HTML, also inside a quoted attribute."""
    return html.escape(str(value), quote=True)


def verdict(found: Verdict) -> str:
    shown = found.findings[:SHOWN_FINDINGS]
    items = "".join(f'<li class="{f.level}">{esc(f.text)}</li>' for f in shown)
    if len(found.findings) > len(shown):
        items += f"<li>and {len(found.findings) - len(shown)} more</li>"
    return f'<section class="verdict {found.level}"><h2>{esc(found.title)}</h2><ul>{items}</ul></section>'


def cards(summary: Mapping[str, Any]) -> str:
    """The figures that one looks at first. A figure that the run doesn't have is left out."""
    first, last = summary.get("reward_first3"), summary.get("reward_last3")
    rows: list[tuple[str, str | None]] = [
        ("steps", _whole(summary.get("steps"))),
        ("rollouts", _whole(summary.get("rollouts_completed"))),
        ("reward, first → last 3 steps", None if first is None or last is None else f"{first:.2f} → {last:.2f}"),
        ("paused per publication, median", _with(summary.get("paused_ms_median"), "{:.0f} ms")),
        ("prefix hit rate inside a version", _with(summary.get("prefix_hit_rate_within_version"), "{:.1%}")),
        ("version lag, mean", _with(summary.get("version_lag_mean"), "{:.2f}")),
    ]
    return "".join(
        f'<div class="card"><b>{esc(value)}</b><span>{esc(name)}</span></div>' for name, value in rows if value
    )


def key_figures(summary: Mapping[str, Any]) -> str:
    """Every plain figure of the summary, under the names that the file uses."""
    rows = []
    for key, value in summary.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {count}" for name, count in value.items() if not isinstance(count, list | dict))
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif isinstance(value, float):
            value = f"{value:.6g}"
        rows.append(f"<div><span>{esc(key)}</span> {esc('-' if value is None else value)}</div>")
    return f'<div class="figures">{"".join(rows)}</div>' if rows else "<p>There are none.</p>"


def audit(result: Mapping[str, Any] | None, violations: Sequence[Mapping[str, Any]]) -> str:
    if result is None:
        return (
            "<p>This run was not audited at its end. "
            f"<code>{esc(command('audit'))} RUN_DIR</code> prints an audit of it.</p>"
        )
    verdict = result.get("verdict") or {}
    figures = [
        ("verdict", f"{verdict['outcome']}: {verdict['text']}" if verdict else None),
        ("rollouts checked", f"{_whole(result.get('rollouts'))} of {_whole(result.get('recorded'))}"),
        ("of these, lived through a publication", _whole(result.get("crossing"))),
        ("tokens recomputed", _whole(result.get("tokens"))),
        ("violations", str(len(violations))),
        ("largest |difference of log-prob|", _with(result.get("max_abs_logprob_diff"), "{:.2g}")),
        ("mean |difference of log-prob|", _with(result.get("mean_abs_logprob_diff"), "{:.2g}")),
        ("tolerance", _with(result.get("tolerance"), "{:g}")),
    ]
    for kind, found in (result.get("differences") or {}).items():
        quantiles = ", ".join(f"{100 * float(share):g} %: {value:.1e}" for share, value in found["quantiles"].items())
        figures.append((f"quantiles, {KIND_NAMES.get(kind, kind)}", f"{quantiles} ({_whole(found['tokens'])} tokens)"))
    rows = "".join(f"<tr><th>{esc(name)}</th><td>{esc(value or '-')}</td></tr>" for name, value in figures)
    text = f'<table class="narrow">{rows}</table>'
    if violations:
        head = "<tr><th>receipt</th><th>engine</th><th>claims</th><th>what was found</th></tr>"
        body = "".join(
            "<tr>"
            + "".join(f"<td>{esc(v.get(key, '?'))}</td>" for key in ("receipt", "engine", "claimed", "detail"))
            + "</tr>"
            for v in violations[:SHOWN_VIOLATIONS]
        )
        text += f'<h3>Violations</h3><table class="listed">{head}{body}</table>'
        if len(violations) > SHOWN_VIOLATIONS:
            text += f"<p>{len(violations) - SHOWN_VIOLATIONS} more are in audit.json.</p>"
    return text


def samples(
    records: Sequence[RolloutRecord],
    colours: Mapping[str, str],
    violated: Mapping[str, str],
    classes: Mapping[str, Any],
) -> str:
    """Drawings of some rollouts. `violated`: receipt -> what the audit found; `classes`: class -> how many."""
    if not records:
        return "<p>No rollout is there to be drawn.</p>"
    counted = ", ".join(f"{count:,} {esc(name)}" for name, count in classes.items() if isinstance(count, int))
    intro = f"<p>Of all rollouts: {counted}.</p>" if counted else ""
    return intro + "".join(_sample(record, colours, violated.get(record.receipt)) for record in records)


def _sample(record: RolloutRecord, colours: Mapping[str, str], violation: str | None) -> str:
    name = record.rollout_class
    question = " ".join(record.question.split())
    if len(question) > QUESTION_CHARACTERS:
        question = question[:QUESTION_CHARACTERS] + " …"
    facts = (
        f"<code>{esc(record.receipt[:12])}</code> on {esc(record.engine)}, reward {record.reward:.3f}, "
        f"{len(record.prefills)} prefill{'s' if len(record.prefills) != 1 else ''}"
    )
    found = f'<p class="found">Audit: {esc(violation)}</p>' if violation else ""
    return (
        f'<article class="rollout"><h3><span class="class">{esc(name)}</span> {esc(CLASS_MEANING[name])}</h3>'
        f'<p class="facts">{facts}. Question: <q>{esc(question)}</q></p>{found}{draw_svg(record, colours)}</article>'
    )


def _whole(value: Any) -> str | None:
    return _with(value, "{:,.0f}")


def _with(value: Any, pattern: str) -> str | None:
    formatted: Callable[..., str] = pattern.format
    return formatted(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
