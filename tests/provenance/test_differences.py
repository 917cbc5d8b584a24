"""The histogram of differences against plain sorting."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.audit.differences import BINS, QUANTILES, Differences, span_kind, upper_edge
from slime_backend.wire import KvSegment, Prefill, Span

from .examples import example


@given(st.lists(st.floats(1e-8, 50), min_size=1, max_size=200), st.sampled_from(QUANTILES))
def test_quantiles_are_never_too_small_and_at_most_a_bin_too_large(values, share):
    found = Differences()
    found.add(values)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert exact <= found.quantile(share) * (1 + 1e-12)
    assert found.quantile(share) <= exact * 10**0.1 * (1 + 1e-12)
    assert found.quantile(1.0) == found.largest == max(values)


def test_what_is_outside_and_what_is_no_number():
    found = Differences()
    found.add([0.0, 1e-12, 1e-8, 1e5, math.nan])
    assert (found.bins[0], found.bins[-1]) == (3, 2)
    assert found.largest == math.inf
    assert upper_edge(0) == pytest.approx(1e-8 * 10**0.1)
    assert upper_edge(BINS - 1) == pytest.approx(100)


def test_it_survives_the_file():
    found = Differences()
    found.add([1e-7, 3e-7, 2e-3])
    data = json.loads(json.dumps(found.to_json()))
    assert len(data["bins"]) < BINS
    again = Differences.from_json(data)
    assert (again.bins, again.tokens, again.largest) == (found.bins, 3, 2e-3)


def test_each_token_has_the_kind_of_its_segment():
    kinds = {name: _kinds(example(name)) for name in ("pure", "recomputed", "mixed", "carried", "carried, unmixed")}
    assert kinds == {
        "pure": ["own"],
        "recomputed": ["recomputed"],
        "mixed": ["own", "recomputed"],
        "carried": ["own", "carried"],
        "carried, unmixed": ["carried"],
    }


def test_two_prefills_of_a_rollout_that_began_before_the_retract():
    segments = (KvSegment(0, 5, "v0", (Span("v0", 0, 28),)), KvSegment(5, 9, "v1", (Span("v1", 0, 32),)))
    prefills = (Prefill(0, 0, "v0", 0, 24), Prefill(1, 0, "v1", 0, 29))
    assert [span_kind(i, segments, prefills) for i in (0, 1)] == ["own", "recomputed"]


def _kinds(record):
    return [span_kind(i, record.segments, record.prefills) for i in range(len(record.segments))]
