"""The pages in docs/benchmarks are made of their data: nobody wrote a figure into one."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_backend.bench import pages
from slime_backend.bench.catalog import BENCHES, Bench

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.mark.parametrize("bench", BENCHES, ids=lambda entry: entry.name)
def test_a_page_is_made_of_its_data(bench: Bench) -> None:
    runs = pages.read(FOLDER, bench)
    page = FOLDER / f"{bench.name}.md"
    assert page.exists() == bool(runs)
    if runs:
        text = page.read_text()
        drawn = [(p, f"{bench.name}-{p.name}.svg") for p in getattr(bench.module, "PLOTS", ())]
        pictures = [(p, name) for p, name in drawn if (FOLDER / name).exists()]
        assert text == pages.compose(bench, runs, pictures)


def test_the_index_lists_them() -> None:
    assert (FOLDER / "README.md").read_text() == pages.index(FOLDER)
