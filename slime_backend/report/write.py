"""Puts the report of a run together and writes it into the run's directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_backend import __version__
from slime_backend.command_line import command
from slime_backend.provenance.errors import ReportError
from slime_backend.report import charts, sections, timeline
from slime_backend.report.page import Section, page
from slime_backend.report.palette import version_colours
from slime_backend.report.run_data import RunFiles, read_run
from slime_backend.report.verdict import judge
from slime_backend.run_files import RunDir, replace_file

NO_CHART = "<p>The files of this run have nothing to draw here.</p>"

log = logging.getLogger(__name__)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the files of the run and return its path.

    Raises ReportError without plotly or without a run, OSError where the directory can't be written.
    """
    library = plotly_source()
    run = RunDir(run_dir)
    if not any(file.exists() for file in (run.submitted, run.rollouts, run.summary)):
        raise ReportError(f"{run_dir} holds no run; give a directory that reef-slime train wrote")
    return replace_file(run.report, compose(read_run(run_dir), library))


def report_at_the_end(run_dir: Path, say: Callable[[str], None]) -> None:
    """Write the report after a run. It is a view of it: whatever keeps it from being written is logged and is no
    fault of the run's, whose own outcome must come through.
    """
    try:
        say(f"report: {write_report(run_dir)}")
    except (ReportError, OSError) as error:
        say(f"no report: {' '.join(str(error).split())}")
    except Exception as error:  # a row of a shape that nobody thought of
        log.debug("the report failed", exc_info=True)
        say(f"no report: {type(error).__name__}: {error} ({command('report', run_dir)} shows where)")


def compose(run: RunFiles, plotly: str) -> str:
    """The page. `plotly`: the source of plotly.js."""
    summary, versions = run.summary, run.versions
    colours = version_colours(versions)
    violated = {str(v.get("receipt")): str(v.get("detail")) for v in run.violations}
    return page(
        title=f"Run {run.run_dir.resolve().name}",
        subtitle=_subtitle(run),
        verdict=sections.verdict(judge(summary, run.audit, run.publications, run.missing, run.publication_count)),
        cards=sections.cards(summary),
        sections=[
            _chart("reward", "Reward", charts.reward(run.steps), half=True),
            _chart("lag", "Version lag", charts.lag(run.steps), half=True),
            _chart(
                "hit-rate",
                "Prefix hit rate",
                charts.hit_rate(run.hit_rate, run.drawn_versions),
                "Share of prompt tokens found in the radix cache. A dotted line is a publication: what is cached after "
                "it must begin at 0, since nothing of older weights may be found.",
            ),
            _chart(
                "timeline",
                "Publications along the run",
                timeline.along_the_run(run.publications),
                "Between the bars the engines generate. Drag to look closer, double-click to go back.",
            ),
            _chart(
                "publications",
                _one_by_one_title(run),
                timeline.one_by_one(timeline.chosen(run.publications)),
                "Each step begins on all engines at once, when the slowest has ended the one before. Flush includes "
                "reading the evidence, label the reading back. A red frame is the step at which an engine failed.",
            ),
            Section(
                "samples",
                "Where tokens came from",
                "For some rollouts: which version sampled each output token, and for each KV segment, which version "
                "had computed the KV that the underlined tokens were sampled from.",
                sections.samples(run.samples, colours, violated, summary.get("rollout_classes") or {}),
            ),
            Section(
                "audit",
                "Audit",
                "Each token's log-prob is computed again under the versions that its record names. Right of the dotted "
                "line, the tolerance, lies what doesn't hold."
                if run.audit
                else "",
                sections.audit(run.audit, run.violations),
                charts.differences(run.audit),
            ),
            Section("figures-table", "All figures of the summary", body=sections.key_figures(summary)),
        ],
        footer=f"Written by reef-slime {__version__} on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC "
        "from the files of the run. The file needs no network.",
        plotly=plotly,
    )


def _chart(key: str, title: str, figure: dict[str, Any] | None, note: str = "", half: bool = False) -> Section:
    return Section(key, title, note, "" if figure is not None else NO_CHART, figure, half)


def _one_by_one_title(run: RunFiles) -> str:
    total = run.publication_count
    if total <= timeline.DRAWN:
        return "Each publication"
    return f"{timeline.DRAWN} of {total:,} publications: unconfirmed ones first, then the slowest"


def _subtitle(run: RunFiles) -> str:
    started = next((p["started_at"] for p in run.publications if isinstance(p.get("started_at"), int | float)), None)
    when = f"first publication {time.strftime('%Y-%m-%d %H:%M', time.gmtime(started))} UTC" if started else ""
    policy = run.summary.get("policy") or next((p.get("policy") for p in run.publications), None)
    return " · ".join(str(part) for part in (policy, when, run.sampled) if part)


def plotly_source() -> str:
    """The source of plotly.js, from the installed package. Raises ReportError without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        missing = (error.name or "plotly").partition(".")[0]
        raise ReportError(f"the report needs {missing}: pip install 'reef-slime[report]'") from error
    source: str = get_plotlyjs()
    return source
