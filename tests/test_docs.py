"""Holds the documentation together: every link leads to a file and a heading, the indexes name every page, and the
architecture page names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
PACKAGES = tuple(
    ROOT / name for name in ("slime_backend", "slime_backend/slime_hooks", "slime_backend/report", "reef_service")
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; code blocks have none."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(link)
    return broken


def linked_pages(index: Path) -> set[Path]:
    return {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}


def named_files(text: str) -> set[str]:
    """Paths of Python files and packages that stand in code quotes."""
    return {path for path in re.findall(r"`([\w/]+(?:\.py|/))(?:: [^`]*)?`", text) if "/" in path}


def missing_files(text: str) -> list[str]:
    places = (ROOT, *PACKAGES)
    return sorted(path for path in named_files(text) if not any((place / path).exists() for place in places))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_link_to_nothing_is_found() -> None:
    text = "see [it](docs/no-such-page.md), [this](docs/runs.md), [here](docs/runs.md#no-such-heading)"
    assert broken_links(ROOT / "README.md", text) == ["docs/no-such-page.md", "docs/runs.md#no-such-heading"]


def test_the_index_names_every_page() -> None:
    benches = DOCS / "benchmarks"
    pages = {page for page in DOCS.rglob("*.md") if page != DOCS / "README.md" and page.parent != benches}
    assert pages <= linked_pages(DOCS / "README.md")


def test_every_page_of_measurements_is_in_one_of_the_two_indexes() -> None:
    benches = DOCS / "benchmarks"
    pages = set(benches.glob("*.md")) - {benches / "README.md"}
    assert pages <= linked_pages(DOCS / "README.md") | linked_pages(benches / "README.md")


def test_the_architecture_page_names_files_that_exist() -> None:
    assert missing_files((DOCS / "architecture.md").read_text()) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing_files("`engine_plugin/scope.py: sweep`, `planner/`, `ledger/no_such.py`") == ["ledger/no_such.py"]
