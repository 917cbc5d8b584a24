"""A publication's policy is read from its fields; from the sentence where an earlier version left nothing else."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from slime_backend.policy import Policy, decide
from slime_backend.publication import PublicationReport
from slime_backend.run_files.rows import policy_of

POLICIES = [
    *(decide("disjoint", sharing) for sharing in ("off", "retract", "scoped", "unsafe")),
    *(decide("colocated", sharing) for sharing in ("off", "retract", "scoped")),
]
OLD = {  # as lines of publications.jsonl had it, word for word
    "colocated, prefix sharing off: pause retract, radix cache on, then flush": decide("colocated", "off"),
    "disjoint, prefix sharing off: pause in_place, radix cache off, then nothing": decide("disjoint", "off"),
    "disjoint, prefix sharing retract: pause retract, radix cache on, then flush": decide("disjoint", "retract"),
    "disjoint, prefix sharing scoped: pause in_place, radix cache on, then sweep": decide("disjoint", "scoped"),
    "disjoint, prefix sharing unsafe: pause in_place, radix cache on, then nothing": decide("disjoint", "unsafe"),
}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_report_s_policy_comes_back_whatever_its_sentence_says(policy: Policy):
    row = PublicationReport("v1", "v0", policy, "disk").to_json()
    assert row["policy"] == str(policy)
    assert row["policy_fields"] == asdict(policy)
    assert policy_of(row) == policy
    assert policy_of({**row, "policy": "reworded for people"}) == policy


@pytest.mark.parametrize(("sentence", "policy"), OLD.items())
def test_a_line_of_an_earlier_version_has_the_sentence_alone(sentence: str, policy: Policy):
    assert policy_of({"version": "v1", "policy": sentence}) == policy


def test_facts_are_taken_as_they_were_and_not_decided_again():
    """A policy that the table has no longer, of words that it knows."""
    was = replace(decide("disjoint", "scoped"), pause_mode="abort")
    assert policy_of(PublicationReport("v1", "v0", was, "disk").to_json()) == was


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"policy": "a policy"},
        {"policy": None},
        {"policy": "disjoint, prefix sharing maybe: pause in_place, radix cache on, then sweep"},
        {"policy": f"{decide('disjoint', 'off')}; then {decide('disjoint', 'scoped')}"},  # a summary's, of two
        {"policy_fields": {}},
        {"policy_fields": {**asdict(decide("disjoint", "off")), "layout": "spread"}},
        {"policy_fields": {**asdict(decide("disjoint", "off")), "pause_mode": ["in_place"]}},
    ],
)
def test_what_names_no_policy_is_none(row):
    assert policy_of(row) is None
