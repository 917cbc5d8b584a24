"""Each class from the spans alone, its precedence, and the drawings that the documentation shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.audit.audit import why_inconsistent
from slime_backend.engine_plugin.trace import Admission, RequestTrace
from slime_backend.provenance.classes import CLASSES, classify, count_classes, traits
from slime_backend.provenance.drawing import draw
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import Span

from .examples import SEGMENTS, example

DOCS = Path(__file__).resolve().parents[2] / "docs" / "provenance.md"

TRAITS = {
    "pure": ("pure",),
    "recomputed": ("recomputed",),
    "mixed": ("recomputed", "mixed"),
    "carried": ("mixed", "carried"),
    "carried, unmixed": ("carried",),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_class_is_the_strongest_trait(name):
    record = example(name)
    assert not why_inconsistent(record)
    assert record.traits == TRAITS[name]
    assert record.rollout_class == TRAITS[name][-1] == name.split(",")[0]


def test_a_replaced_context_shows_without_prefills():
    """A retract across versions is seen in the spans themselves; one that changed no version only in the prefills."""
    for name, expected in (("mixed", True), ("carried", False), ("recomputed", False)):
        record = example(name)
        assert ("recomputed" in traits(record.spans, record.segments, ())) is expected


def test_the_record_carries_its_class_and_does_not_believe_it():
    data = example("carried").to_json()
    assert data["class"] == "carried"
    again = RolloutRecord.from_json({**data, "class": "pure"})
    assert again.rollout_class == "carried"
    # A record that was written before sessions were belongs to its group.
    del data["session"]
    assert RolloutRecord.from_json(data).session == "g00001"


def test_counts_name_every_class():
    assert count_classes(["mixed", "pure", "mixed"]) == {"pure": 1, "recomputed": 0, "mixed": 2, "carried": 0}


EVENTS = st.lists(st.tuples(st.sampled_from(["decode", "in_place", "retract"]), st.integers(1, 6)), max_size=12)


@given(EVENTS, st.integers(2, 20))
def test_every_life_of_a_request_has_the_class_of_what_happened_to_it(events, prompt):
    """The plugin's own trace, driven at random, against a plain account of the KV position by position."""
    trace = RequestTrace(prompt_length=prompt)
    label = "v{}".format
    epoch = sampled = 0
    sampler: list[int] = []  # per output token
    origin = [0] * prompt  # per position with KV: who computed it
    sampled_over: list[set[int]] = []  # per output token: the versions in its context
    prefills = 1
    trace.admit(Admission(0, 0, 0, prompt), 0)

    def decode(count: int) -> None:
        nonlocal sampled
        for _ in range(count):
            origin.extend([epoch] * (prompt + sampled - len(origin)))
            sampled_over.append(set(origin))
            sampler.append(epoch)
            sampled += 1

    for kind, count in (*events, ("decode", 1)):
        if kind == "decode":
            decode(count)
            continue
        trace.publish(epoch, None if kind == "retract" else len(origin), sampled)
        epoch += 1
        if kind == "retract":
            origin[:] = [epoch] * (prompt + sampled)
            trace.admit(Admission(epoch, 0, 0, prompt + sampled), sampled)
            prefills += 1
    segments = trace.kv_segments(epoch, sampled, label)
    spans = [Span(label(v), i, i + 1) for i, v in enumerate(sampler)]
    carried = any(over != {by} for over, by in zip(sampled_over, sampler, strict=True))
    holds = {"recomputed": prefills > 1, "mixed": len(set(sampler)) > 1, "carried": carried}
    expected = tuple(name for name in CLASSES if holds.get(name)) or ("pure",)
    assert traits(spans, segments, trace.prefills(label)) == expected
    assert classify(spans, segments, trace.prefills(label)) == expected[-1]


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_documentation_draws_it_as_the_command_does(name):
    assert draw(example(name)) in DOCS.read_text()


def test_the_drawing_of_another_rollout_is_not_in_the_documentation():
    record = example("carried")
    other = dataclasses.replace(record, spans=(Span("v0", 0, 14), Span("v1", 14, 40)))
    assert draw(other) not in DOCS.read_text()


@given(st.integers(1, 3000), st.integers(1, 3000), st.data())
def test_any_rollout_can_be_drawn(prompt, output, data):
    at = data.draw(st.integers(1, output))
    spans = tuple(s for s in (Span("version-with-a-long-name", 0, at), Span("v1", at, output)) if s.end > s.start)
    record = dataclasses.replace(example("pure"), prompt_ids=(0,) * prompt, output_ids=(0,) * output, spans=spans)
    for line in draw(record).splitlines()[:-1]:
        assert len(line) <= 10 + 28 + 56 + 8
