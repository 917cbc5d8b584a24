"""The page in a real browser: its charts are drawn, it fetches nothing, and no text from a run becomes markup.

How it looks is for a person to say; the screenshot is kept in the test's temporary directory.
"""

from __future__ import annotations

import pytest

pytest.importorskip("plotly", reason="plotly is not installed; pip install 'reef-slime[report]'")

from slime_backend.report.write import write_report

from .browser import Elements, dump_dom, find_chromium
from .conftest import HOSTILE, VIOLATION, publication

CHARTS = ("reward", "lag", "hit-rate", "timeline", "publications", "audit")
browser = pytest.mark.skipif(find_chromium() is None, reason="no chromium is installed to open the report in")


@browser
def test_a_browser_draws_every_chart_without_network(make_run, tmp_path):
    report = write_report(make_run())
    picture = tmp_path / "report.png"
    page = Elements(dump_dom(report, picture, tmp_path / "profile"))
    drawn = {attrs["id"] for attrs in page.classed("js-plotly-plot")}
    assert drawn == {f"chart-{name}" for name in CHARTS}
    assert len(page.classed("main-svg")) >= len(CHARTS)
    assert page.classed("bars")
    assert page.classed("js-line")
    assert len(page.classed("spans")) >= 4  # one drawing per class
    assert [a for a in page.addresses() if not a.startswith(("#", "data:"))] == []
    assert picture.stat().st_size > 20_000


@browser
def test_hostile_text_stays_text_in_the_browser(make_run, tmp_path):
    engines = ("engine0" + HOSTILE, "engine1")
    failed = publication(2, engines)
    failed.engines[0].confirmed, failed.engines[0].failed_step, failed.engines[0].reason = False, "flush", HOSTILE
    run = make_run(engines=engines, question=HOSTILE, reports=[publication(1, engines), failed])
    page = Elements(dump_dom(write_report(run), tmp_path / "report.png", tmp_path / "profile"))
    assert page.title == "Run run"
    assert {attrs["id"] for attrs in page.classed("js-plotly-plot")} == {f"chart-{name}" for name in CHARTS}
    assert page.tagged("img") == page.tagged("a") == []
    assert len(page.tagged("script")) == 3


def test_the_file_holds_no_address_and_forbids_the_network(make_run):
    text = write_report(make_run(question=HOSTILE, violations=[VIOLATION])).read_text()
    page = Elements(text)
    assert page.addresses() == []
    policy = next(m["content"] for m in page.tagged("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert "@import" not in text.partition("</style>")[0]
    assert len(page.tagged("script")) == 3
    assert HOSTILE not in text
    assert "&lt;/script&gt;" in text
