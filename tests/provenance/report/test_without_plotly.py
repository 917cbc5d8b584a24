"""Without plotly: one clear line that says what to install, and the run goes on."""

from __future__ import annotations

import sys

import pytest

from slime_backend.provenance.errors import ReportError
from slime_backend.report.write import FILE, report_at_the_end, write_report


@pytest.fixture
def _no_plotly(monkeypatch):
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("_no_plotly")
def test_one_line_says_what_to_install(make_run):
    run_dir, said = make_run(), []
    with pytest.raises(ReportError, match=r"^the report needs plotly: pip install 'reef-slime\[report\]'$"):
        write_report(run_dir)
    report_at_the_end(run_dir, said.append)
    assert said == ["no report: the report needs plotly: pip install 'reef-slime[report]'"]
    assert not (run_dir / FILE).exists()
