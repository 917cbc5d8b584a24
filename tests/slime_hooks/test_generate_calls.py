"""Spans of several calls, shifted to a response; with a stand-in for slime's Sample (the real one: tests/slime)."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest

from slime_backend.audit.audit import why_inconsistent
from slime_backend.slime_hooks.rollouts.functions import keep_spans
from slime_backend.slime_hooks.rollouts.generate_calls import METADATA_KEY, calls_of, record_of, response_spans
from slime_backend.wire import Span, WireError

from .samples import FakeSample, answer, generate

PROMPT = 6


@pytest.fixture
def kind():
    """A class of its own for each test, since the patch changes it."""

    class Sample(FakeSample):
        pass

    keep_spans(SimpleNamespace(Sample=Sample))
    return Sample


@pytest.fixture
def sample(kind):
    return kind(tokens=list(range(PROMPT)))


def two_turns(sample):
    """v1 answers with 5 tokens, a tool with 4, then v1 and v2 sample 7: the middle of them a publication."""
    generate(sample, answer(PROMPT, 5, ["1"]), 5)
    sample.append_response_tokens(tokens=[50, 51, 52, 53], trainable=False)
    generate(sample, answer(PROMPT + 9, 7, ["1", "2"], at=3), 7, first=200)


def record(sample, number):
    return record_of(sample, calls_of(sample)[number], group="g", engine="e", temperature=1.0, reward=0.5)


def test_spans_of_a_second_turn_are_shifted_and_a_tool_answer_is_in_none(sample):
    two_turns(sample)
    assert response_spans(sample) == (Span("1", 0, 5), Span("1", 9, 12), Span("2", 12, 16))
    assert [(c.start, c.end, c.placed) for c in calls_of(sample)] == [(0, 5, True), (9, 16, True)]


def test_each_call_is_a_record_that_an_audit_can_recompute(sample):
    two_turns(sample)
    first, second = record(sample, 0), record(sample, 1)
    assert first.prompt_ids == tuple(range(PROMPT))
    assert first.output_ids == tuple(range(100, 105))
    assert second.prompt_ids == (*range(PROMPT), *range(100, 105), 50, 51, 52, 53)
    assert second.output_ids == tuple(range(200, 207))
    assert second.spans == (Span("1", 0, 3), Span("2", 3, 7))
    assert (first.rollout_class, second.rollout_class, second.retractions) == ("pure", "mixed", 1)
    assert (why_inconsistent(first), why_inconsistent(second)) == ("", "")


def test_an_aborted_sample_that_goes_on_under_new_weights_has_both_versions(sample):
    generate(sample, answer(PROMPT, 5, ["1"], finish="abort"), 5)
    sample = copy.deepcopy(sample)  # through slime's buffer
    generate(sample, answer(PROMPT + 5, 3, ["2"]), 3)
    assert response_spans(sample) == (Span("1", 0, 5), Span("2", 5, 8))
    assert [c.finish_reason for c in calls_of(sample)] == ["abort", "stop"]
    assert record(sample, 1).prompt_ids == tuple(sample.tokens[: PROMPT + 5])


def test_metadata_is_plain_json_and_what_was_there_stays(kind):
    sample = kind(tokens=list(range(PROMPT)), metadata={"source": "math"})
    generate(sample, answer(PROMPT, 5, ["1"]), 5)
    assert json.loads(json.dumps(sample.metadata)) == sample.metadata
    assert sample.metadata["source"] == "math"
    assert calls_of(kind(metadata=json.loads(json.dumps(sample.metadata)))) == calls_of(sample)


def test_a_sample_without_metadata_gets_one(kind):
    sample = kind(tokens=list(range(PROMPT)), metadata=None)
    assert calls_of(sample) == []
    generate(sample, answer(PROMPT, 5, ["1"]), 5)
    assert len(calls_of(sample)) == 1


def test_a_call_whose_prompt_was_another_text_keeps_its_sampled_spans_and_gives_no_record(sample):
    generate(sample, answer(PROMPT, 5, ["1"]), 5)
    generate(sample, answer(PROMPT + 4, 3, ["2"]), 3)  # tokenized again: one token fewer than the sample has
    assert response_spans(sample)[1] == Span("2", 5, 8)
    assert not calls_of(sample)[1].placed
    assert record(sample, 0) is not None
    assert record(sample, 1) is None


def test_a_response_that_was_cut_since_gives_no_record_of_what_was_cut(sample):
    generate(sample, answer(PROMPT, 5, ["1"]), 5)
    sample.response_length, sample.tokens = 3, sample.tokens[:-2]
    assert response_spans(sample) == (Span("1", 0, 3),)
    assert record(sample, 0) is None


def test_chunks_of_a_stream_and_empty_aborts_leave_no_note(sample):
    chunk = {**answer(PROMPT, 2, ["1"]), "finish_reason": None}
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0, -1.0], meta_info=chunk, final=False)
    sample.append_response_tokens(tokens=[], meta_info={**answer(PROMPT, 0, ["1"]), "finish_reason": {"type": "abort"}})
    assert calls_of(sample) == []


def test_an_engine_without_our_hooks_leaves_no_note(sample):
    generate(sample, {"finish_reason": {"type": "stop"}, "prompt_tokens": PROMPT, "weight_version": "1"}, 5)
    assert METADATA_KEY not in sample.metadata


def test_an_engine_that_says_only_who_sampled_gives_lag_but_no_record(sample):
    meta = answer(PROMPT, 5, ["1"])
    del meta["kv_provenance"], meta["prefills"]
    generate(sample, meta, 5)
    assert response_spans(sample) == (Span("1", 0, 5),)
    assert record(sample, 0) is None


def test_spans_of_another_form_are_an_error(sample):
    with pytest.raises(WireError, match="Span: the engine's report lacks end"):
        generate(sample, {**answer(PROMPT, 5, ["1"]), "weight_versions": [{"version": "1", "start": 0}]}, 5)


def test_a_sample_that_no_longer_takes_the_count_is_refused_by_name():
    class Moved:
        def _apply_meta_info(self, args, meta_info, tokens):
            pass

    with pytest.raises(ImportError, match=r"types.py: Sample._apply_meta_info takes .*no longer new_token_count"):
        keep_spans(SimpleNamespace(Sample=Moved))
