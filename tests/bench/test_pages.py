"""The pages of benches: what is kept, what is replaced, what a page contains."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.bench import pages, plots
from slime_backend.bench.catalog import Bench
from slime_backend.bench.rows import Row, cost_row

ROOT = Path(__file__).resolve().parents[2]
PLOT = plots.Plot("size", "by size", "engines", "ms", r"(?P<x>\d+) engines", "stock", "ours")
BENCH = Bench("made", "a bench", "measures nothing", ("first", "second"))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__doc__="`reef-slime bench made`: how it is measured.", PLOTS=(PLOT,))
    monkeypatch.setattr(Bench, "module", property(lambda self: module))
    monkeypatch.setattr(pages, "BENCHES", (BENCH,))


def run(part: str | None, *rows: Row) -> pages.Run:
    return pages.Clock().run(BENCH, part, rows)


def sizes(*ms: float) -> list[Row]:
    return [cost_row(f"{2**i} engines", [10 * m, 11 * m, 12 * m], [m, m, 2 * m]) for i, m in enumerate(ms)]


def test_a_part_replaces_itself_and_a_complete_run_replaces_all(tmp_path: Path) -> None:
    pages.write(tmp_path, BENCH, run("second", *sizes(1, 2)))
    pages.write(tmp_path, BENCH, run("first", *sizes(3)))
    assert [r.part for r in pages.read(tmp_path, BENCH)] == ["first", "second"]
    pages.write(tmp_path, BENCH, run("first", *sizes(4)))
    text = (tmp_path / "made.md").read_text()
    assert "| 1 engines | 44 (42 .. 46) | 4 (4 .. 6) | 11 | - | yes |" in text
    assert "| 1 engines | 33" not in text
    assert "`reef-slime bench made --part first`" in text
    pages.write(tmp_path, BENCH, run(None, *sizes(5)))
    assert [r.part for r in pages.read(tmp_path, BENCH)] == [None]


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    complete = run(None, *sizes(1, 2), Row("a|b", None, 1.0, None, "under 1", False))
    pages.write(tmp_path, BENCH, complete)
    (back,) = pages.read(tmp_path, BENCH)
    assert dataclasses.replace(back, rows=[]) == dataclasses.replace(complete, rows=[])
    assert [r.case for r in back.rows] == [r.case for r in complete.rows]
    assert pages.compose(BENCH, [back], []) == pages.compose(BENCH, [complete], [])


def test_a_page_names_neither_the_host_nor_a_path(tmp_path: Path) -> None:
    pages.write(tmp_path, BENCH, run(None, *sizes(1)))
    text = (tmp_path / "made.md").read_text() + (tmp_path / "made.json").read_text()
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text
    assert str(ROOT) not in text


def test_the_plot_is_of_the_cases_that_fit_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib; make bench installs it")
    other = Row("no number", 1.0, 1.0, 1.0, "-", True)
    rows = [other, *sizes(1, 2, 4)]
    assert [(x, row.ours) for x, row in plots.points(PLOT, rows)] == [(1, 1), (2, 2), (4, 4)]
    pages.write(tmp_path, BENCH, run(None, *rows))
    first = (tmp_path / "made-size.svg").read_bytes()
    assert b"by size" in first
    assert "![by size](made-size.svg)" in (tmp_path / "made.md").read_text()
    pages.write(tmp_path, BENCH, run(None, *rows))
    assert (tmp_path / "made-size.svg").read_bytes() == first
    pages.write(tmp_path, BENCH, run(None, *sizes(1, 8, 4)))
    assert (tmp_path / "made-size.svg").read_bytes() != first
    pages.write(tmp_path, BENCH, run(None, other))  # nothing to draw: the old picture doesn't stay
    assert not list(tmp_path.glob("*.svg"))
    assert "![" not in (tmp_path / "made.md").read_text()


def test_without_matplotlib_the_page_has_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    pages.write(tmp_path, BENCH, run(None, *sizes(1, 2)))
    assert not list(tmp_path.glob("*.svg"))
    assert "![" not in (tmp_path / "made.md").read_text()


@pytest.mark.parametrize(
    ("goal", "holds"),
    [({"at_least": 10.0}, True), ({"at_least": 12.0}, False), ({"below": 2.0}, True), ({"below": 1.0}, False)],
)
def test_a_goal_is_of_the_medians(goal: Any, holds: bool) -> None:
    row = cost_row("case", [11.0, 9.0, 12.0], [1.0, 0.5, 3.0], **goal)
    assert (row.peer, row.ours, row.ratio, row.holds) == (11.0, 1.0, 11.0, holds)
