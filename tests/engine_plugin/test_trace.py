"""The per-request record, without an engine. Not tested here: when SGLang calls it (test_kv_spans_engine.py)."""

from __future__ import annotations

import pytest

from slime_backend.engine_plugin.epoch import WeightEpoch
from slime_backend.engine_plugin.trace import Admission, RequestTrace
from slime_backend.wire import KvSegment, Prefill, Span

PROMPT = 10


def label(epoch: int) -> str:
    return f"v{epoch}"


def admission(epoch: int, order: int = 0, cached: int = 0, total: int = PROMPT) -> Admission:
    return Admission(epoch, order, cached, total)


@pytest.fixture
def trace() -> RequestTrace:
    started = RequestTrace(prompt_length=PROMPT)
    started.admit(admission(0), sampled=0)
    return started


def test_one_version_is_one_segment_whose_context_ends_before_the_last_token(trace: RequestTrace) -> None:
    assert trace.kv_segments(0, 4, label) == [KvSegment(0, 4, "v0", (Span("v0", 0, PROMPT + 3),))]


def test_first_token_is_sampled_from_the_prompt_alone(trace: RequestTrace) -> None:
    assert trace.kv_segments(0, 1, label) == [KvSegment(0, 1, "v0", (Span("v0", 0, PROMPT),))]


def test_no_output_is_no_segment(trace: RequestTrace) -> None:
    assert trace.kv_segments(0, 0, label) == []


def test_in_place_publication_splits_the_context_and_keeps_the_earlier_segment(trace: RequestTrace) -> None:
    trace.publish(0, committed=PROMPT + 3, sampled=4)
    assert trace.kv_segments(1, 6, label) == [
        KvSegment(0, 4, "v0", (Span("v0", 0, PROMPT + 3),)),
        KvSegment(4, 6, "v1", (Span("v0", 0, PROMPT + 3), Span("v1", PROMPT + 3, PROMPT + 5))),
    ]


def test_publication_during_a_chunked_prefill_leaves_one_sampled_segment_over_mixed_context(
    trace: RequestTrace,
) -> None:
    trace.publish(0, committed=6, sampled=0)
    assert trace.kv_segments(1, 2, label) == [KvSegment(0, 2, "v1", (Span("v0", 0, 6), Span("v1", 6, PROMPT + 1)))]


def test_retract_across_a_publication_replaces_the_context_of_later_tokens_only(trace: RequestTrace) -> None:
    trace.publish(0, committed=None, sampled=4)
    trace.admit(admission(1, total=PROMPT + 4), sampled=4)
    assert trace.kv_segments(1, 6, label) == [
        KvSegment(0, 4, "v0", (Span("v0", 0, PROMPT + 3),)),
        KvSegment(4, 6, "v1", (Span("v1", 0, PROMPT + 5),)),
    ]


def test_retract_without_a_publication_does_not_show(trace: RequestTrace) -> None:
    trace.admit(admission(0, order=1, total=PROMPT + 4), sampled=4)
    assert trace.kv_segments(0, 6, label) == [KvSegment(0, 6, "v0", (Span("v0", 0, PROMPT + 5),))]


def test_retract_without_a_publication_shows_when_it_replaced_mixed_context(trace: RequestTrace) -> None:
    trace.publish(0, committed=PROMPT + 1, sampled=2)
    trace.admit(admission(1, total=PROMPT + 4), sampled=4)
    mixed = (Span("v0", 0, PROMPT + 1), Span("v1", PROMPT + 1, PROMPT + 3))
    assert trace.kv_segments(1, 6, label)[1:] == [
        KvSegment(2, 4, "v1", mixed),
        KvSegment(4, 6, "v1", (Span("v1", 0, PROMPT + 5),)),
    ]


def test_a_second_publication_while_a_request_waits_without_kv_adds_nothing(trace: RequestTrace) -> None:
    trace.publish(0, committed=None, sampled=4)
    trace.publish(1, committed=None, sampled=4)
    trace.admit(admission(2, total=PROMPT + 4), sampled=4)
    assert [segment.version for segment in trace.kv_segments(2, 6, label)] == ["v0", "v2"]


def test_epochs_of_one_name_are_one_span(trace: RequestTrace) -> None:
    """Weights are loaded first and named afterwards: two epochs, no token in between; or renamed to the same name."""
    trace.publish(0, committed=PROMPT + 3, sampled=4)
    trace.publish(1, committed=PROMPT + 3, sampled=4)
    names = {0: "a", 1: "a", 2: "b"}.__getitem__
    assert trace.kv_segments(2, 5, names) == [
        KvSegment(0, 4, "a", (Span("a", 0, PROMPT + 3),)),
        KvSegment(4, 5, "b", (Span("a", 0, PROMPT + 3), Span("b", PROMPT + 3, PROMPT + 4))),
    ]
    assert trace.kv_segments(2, 5, lambda _: "a") == [KvSegment(0, 5, "a", (Span("a", 0, PROMPT + 4),))]


def test_tokens_computed_in_vain_are_cut_off(trace: RequestTrace) -> None:
    """The overlap schedule launches one more step than a request that stops needs; a publication then closes there."""
    trace.publish(0, committed=PROMPT + 4, sampled=5)
    assert trace.kv_segments(1, 3, label) == [KvSegment(0, 3, "v0", (Span("v0", 0, PROMPT + 2),))]


def test_tokens_dropped_by_a_retract_are_dropped_here(trace: RequestTrace) -> None:
    trace.publish(0, committed=None, sampled=4)
    trace.admit(admission(1), sampled=0)
    assert trace.kv_segments(1, 2, label) == [KvSegment(0, 2, "v1", (Span("v1", 0, PROMPT + 1),))]


def test_every_admission_is_one_prefill(trace: RequestTrace) -> None:
    trace.publish(0, committed=None, sampled=4)
    trace.admit(admission(1, order=2, cached=3, total=PROMPT + 4), sampled=4)
    assert trace.prefills(label) == [Prefill(0, 0, "v0", 0, PROMPT), Prefill(1, 2, "v1", 3, PROMPT + 4)]


def test_an_epoch_keeps_the_name_in_force_when_it_ended() -> None:
    served = "a"
    epoch = WeightEpoch(lambda: served)
    ended: list[int] = []
    epoch.on_end(lambda scheduler, number: ended.append(number))
    assert [epoch.next_order(), epoch.next_order()] == [0, 1]
    epoch.advance(None)  # weights change, not named yet
    assert epoch.version(1) == "a"
    epoch.advance(None)  # named
    served = "b"
    assert [epoch.version(n) for n in range(3)] == ["a", "a", "b"]
    assert epoch.next_order() == 0
    assert ended == [0, 1]
