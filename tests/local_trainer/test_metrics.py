"""The table of metrics in docs/runs.md has exactly the names that the code logs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.local_trainer.metric_names import logged

DOCS = Path(__file__).resolve().parents[2] / "docs" / "runs.md"


def documented() -> list[list[str]]:
    """The cells of each row of the table."""
    table = DOCS.read_text().partition("| name | unit |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_table_has_the_names_that_are_logged():
    names = [name for row in documented() for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(names) == len(set(names))
    assert set(names) == logged()


def test_each_row_says_unit_meaning_and_what_to_do():
    for row in documented():
        assert len(row) == 4, row
        assert all(row), row
