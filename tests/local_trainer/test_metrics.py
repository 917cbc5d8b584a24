"""The table of metrics in docs/runs.md has exactly the names that the code logs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from slime_backend.provenance.classes import count_classes
from slime_backend.provenance.staleness import count
from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.tracking.columns import StepMetrics
from slime_backend.tracking.metrics import publication_metrics, rollout_metrics
from slime_backend.tracking.tracker import STEP_METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "runs.md"


def logged() -> set[str]:
    row = {
        "lag_mean": 0.0,
        "lag_max": 0,
        "mixed_share": 0.0,
        "retracted_share": 0.0,
        "classes": count_classes([]),
        # As loop._record puts them together.
        "staleness": {**count([]), "tokens_masked_ratio_low": 0, "tokens_masked_ratio_high": 0},
    }
    families = {
        "train": [f.name for f in fields(StepMetrics)],
        "rollout": rollout_metrics(row, [], 0),
        "publication": publication_metrics(PublicationReport("v1", "v0", "", "disk", engines=[EngineOutcome("e")])),
    }
    assert set(families) == set(STEP_METRICS)
    return {f"{family}/{name}" for family, names in families.items() for name in names}


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
