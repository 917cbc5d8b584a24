"""Holds the documentation together: every link leads to a file, and the index names every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def broken_links(page: Path, text: str) -> list[str]:
    return [target for target in LINK.findall(text) if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path):
    assert broken_links(page, page.read_text()) == []


def test_a_link_to_nothing_is_found():
    assert broken_links(ROOT / "README.md", "see [it](docs/no-such-page.md) and [this](docs/runs.md)") == [
        "docs/no-such-page.md"
    ]


def test_the_index_names_every_page():
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked
