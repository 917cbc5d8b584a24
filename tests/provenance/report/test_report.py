"""What the report says of a run: the verdict, what is missing, the charts' figures. No browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from slime_backend.provenance.errors import ReportError
from slime_backend.report import charts, timeline, write
from slime_backend.report.hit_rate import HitRate
from slime_backend.report.page import STATIC, STYLE, VARIABLES
from slime_backend.report.run_data import read_run
from slime_backend.report.verdict import judge

from .conftest import HOSTILE, VIOLATION, publication

FILES = ("summary.json", "steps.jsonl", "publications.jsonl", "rollouts.jsonl", "audit.json")


@pytest.fixture(autouse=True)
def _short_library(monkeypatch):
    """These tests read the page; five megabytes of library in each would only cost time."""
    monkeypatch.setattr(write, "plotly_source", lambda: "/* plotly */")


def verdict_of(run_dir):
    run = read_run(run_dir)
    return judge(run.summary, run.audit, run.publications, run.missing)


def test_a_whole_run_is_good(make_run):
    found = verdict_of(make_run())
    assert found.level == "good"
    assert any("0 violations in 5 rollouts" in f.text for f in found.findings)
    assert any("3 publications, each confirmed on every engine; 6 flushes verified" in f.text for f in found.findings)


def test_a_violation_is_bad_named_and_drawn(make_run):
    run_dir = make_run(violations=[VIOLATION])
    assert verdict_of(run_dir).level == "bad"
    assert read_run(run_dir).samples[0].receipt == VIOLATION.receipt
    text = write.write_report(run_dir).read_text()
    assert text.count("token 17 differs by 0.03") == 2  # in the table, and beside the drawing


def test_too_small_a_sample_is_a_warning(make_run):
    found = verdict_of(make_run(checked=1))
    assert found.level == "warning"
    assert "not enough samples: 1 of 5 rollouts audited" in found.findings[0].text


def test_an_audit_that_still_goes_on_is_a_warning(make_run):
    run_dir = make_run()
    data = json.loads((run_dir / "audit.json").read_text())
    (run_dir / "audit.json").write_text(json.dumps({**data, "finished": False}))
    assert any("it was still going on" in f.text for f in verdict_of(run_dir).findings if f.level == "warning")


def test_differences_are_drawn_by_kind_of_span_with_the_tolerance(make_run):
    audit = read_run(make_run()).audit
    figure = charts.differences(audit)
    assert [trace["name"] for trace in figure["data"]] == ["own KV, at the first go", "own KV, computed again"]
    for trace in figure["data"]:
        assert sum(trace["y"]) == 20
        assert len(trace["x"]) == len(trace["y"]) == len(trace["width"])
    assert figure["layout"]["shapes"][0]["x0"] == audit["tolerance"]
    assert charts.differences({**audit, "differences": {}}) is None


def test_a_retired_engine_is_a_warning_with_its_reason(make_run):
    report = publication(2, ("engine0", "engine1"))
    report.engines[1].confirmed, report.engines[1].failed_step, report.engines[1].reason = False, "load", "disk full"
    found = verdict_of(make_run(reports=[publication(1, ("engine0", "engine1")), report]))
    assert found.level == "warning"
    assert found.findings[0].text == "engine1 was retired at v2: load: disk full"


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"completed": False}, "warning", "interrupted"),
        ({"rollouts_lost": 3}, "bad", "3 rollouts submitted that never came back"),
        ({"rollouts_lost": 3, "completed": False}, "warning", "never came back"),
        ({"rollouts_doubled": 1}, "bad", "1 rollout recorded twice"),
        ({"cached_tokens_first_after_publication_max": 1024}, "bad", "1,024 tokens came from the cache"),
    ],
)
def test_figures_of_the_summary_that_count(make_run, change, level, words):
    run = read_run(make_run())
    found = judge({**run.summary, **change}, run.audit, run.publications, run.missing)
    assert found.level == level
    assert any(words in f.text for f in found.findings if f.level == level)


def test_a_version_that_was_never_published_is_named(make_run):
    engines = ("engine0", "engine1")
    found = verdict_of(make_run(reports=[publication(3, engines)]))  # the rollouts are of v0 and v1
    assert found.level == "warning"
    assert any("publications.jsonl doesn't: v0, v1." in f.text for f in found.findings)


def test_a_failed_publication_is_bad(make_run):
    report = publication(1, ("engine0", "engine1"))
    report.state = "failed"
    assert verdict_of(make_run(reports=[report])).level == "bad"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(make_run, name):
    run_dir = make_run()
    (run_dir / name).unlink()
    found = verdict_of(run_dir)
    assert found.level == "warning"
    expected = "ledger" if name == "rollouts.jsonl" else name
    assert any(expected in f.text for f in found.findings if f.level == "warning")
    assert "Written by reef-slime" in write.write_report(run_dir).read_text()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [b"", b'{"half', b'["no object"]\n', b'{"other": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_file_costs_only_its_part(make_run, name, damage):
    run_dir = make_run()
    (run_dir / name).write_bytes(damage)
    assert "Written by reef-slime" in write.write_report(run_dir).read_text()
    assert verdict_of(run_dir).level != "good"


def test_a_run_that_was_killed_at_once_has_a_report(tmp_path):
    (tmp_path / "submitted.jsonl").write_text('{"receipt": "a"}\n')
    text = write.write_report(tmp_path).read_text()
    for name in FILES:
        assert name in text or name == "rollouts.jsonl"
    assert text.count(write.NO_CHART) == 5


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match="holds no run"):
        write.write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hit_rate_begins_anew_with_each_version():
    rates = HitRate()
    for version in ("v0", "v1"):
        for order in range(41):
            prefill = {"version": version, "order": order, "cached": 0 if order == 0 else 90, "total": 100, "epoch": 0}
            rates.add({"engine": "engine0", "prefills": [prefill]})
    points = rates.course("engine0", ["v0", "v1"])
    assert [p.x for p in points] == sorted(p.x for p in points)
    firsts = [p for p in points if p.last == 0]
    assert [(p.x, p.rate) for p in firsts] == [(0.0, 0.0), (1.0, 0.0)]
    assert {p.rate for p in points if p.last > 0} == {0.9}
    assert sum(p.tokens for p in points) == 2 * 41 * 100


def test_many_versions_and_admissions_are_few_points():
    rates = HitRate()
    versions = [f"v{k}" for k in range(500)]
    for version in versions:
        prefills = [
            {"version": version, "order": order, "cached": order, "total": 300, "epoch": 0}
            for order in range(0, 300, 7)
        ]
        rates.add({"engine": "engine0", "prefills": prefills})
    points = rates.course("engine0", versions)
    assert 500 <= len(points) <= 2000
    assert sum(p.tokens for p in points) == 500 * 43 * 300


def test_a_step_begins_when_the_slowest_engine_ended_the_one_before():
    found = {(bar.engine, bar.step): bar for bar in timeline.bars(publication(1, ("a", "b")).to_json())}
    assert (found["a", "pause"].start, found["a", "flush"].start, found["b", "flush"].start) == (0.0, 7.0, 7.0)
    assert found["a", "label"].start == 7.0 + 60.0 + 23.0


def test_a_step_that_was_not_reached_is_not_drawn():
    report = publication(1, ("a", "b"))
    del report.engines[0].times["load"], report.engines[0].times["label"]
    report.engines[0].failed_step = "flush"
    drawn = timeline.bars(report.to_json())
    assert {bar.step for bar in drawn if bar.engine == "a"} == {"pause", "flush", "resume"}
    assert [bar.step for bar in drawn if bar.failed] == ["flush"]


def test_of_many_publications_the_unconfirmed_and_the_slowest_are_drawn():
    reports = [publication(k, ("a", "b")).to_json() for k in range(1, 101)]
    reports[10]["engines"][0]["confirmed"] = False
    for k in range(20, 60):
        reports[k]["wall_ms"] = 1000.0 + k
    shown = timeline.chosen(reports)
    assert len(shown) == timeline.DRAWN
    names = [p["version"] for p in shown]
    assert names[0] == "v11"
    assert names[1:] == [f"v{k}" for k in range(46, 61)]


def test_plotly_accepts_every_figure(make_run):
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    run = read_run(make_run(engines=("a" + HOSTILE, "b")))
    figures = (
        charts.reward(run.steps),
        charts.lag(run.steps),
        charts.hit_rate(run.hit_rate, run.versions),
        timeline.along_the_run(run.publications),
        timeline.one_by_one(run.publications),
    )
    for figure in figures:
        assert objects.Figure(figure).data  # raises on a property that Plotly doesn't know


def test_a_figure_that_is_no_number_is_drawn_as_a_gap(make_run):
    run_dir = make_run()
    with (run_dir / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "reward_mean": NaN, "lag_mean": NaN, "lag_max": 1}\n')
    text = write.write_report(run_dir).read_text()
    figures = text.partition('id="figures">')[2].partition("</script>")[0]
    assert "NaN" not in figures
    assert "null" in figures


def test_no_report_costs_no_run(make_run, monkeypatch):
    run_dir, said = make_run(), []

    def broken(run_dir):
        raise RuntimeError("a bug")

    monkeypatch.setattr(write, "write_report", broken)
    write.report_at_the_end(run_dir, said.append)
    assert len(said) == 1
    assert said[0].startswith("no report: RuntimeError: a bug")


def test_the_core_does_not_import_plotly():
    code = (
        "import sys, slime_backend.cli, slime_backend.report.write, slime_backend.local_trainer.loop\n"
        "sys.exit('plotly' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_style_sheet_uses_no_colour_that_the_page_does_not_define():
    used = set(re.findall(r"var\(--([a-z]+)\)", (STATIC / "page.css").read_text()))
    assert used == set(VARIABLES)
    assert all(f"--{name}: {value};" in STYLE for name, value in VARIABLES.items())
