"""Staleness on slime's samples, against counts by hand and a plain recount."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.provenance.errors import StalenessError
from slime_backend.slime_hooks.rollouts.generate_calls import METADATA_KEY, note_call
from slime_backend.slime_hooks.rollouts.stale_samples import apply_staleness, trainer_version

from .samples import FakeSample, answer

PROMPT = 4
ARGS = SimpleNamespace(update_weight_start_version=0)


def rollout(*turns, group=0, index=0):
    """`turns`: (version, tokens), or (None, tokens) for a tool's answer."""
    sample = FakeSample(group_index=group, index=index, tokens=[0] * PROMPT)
    for version, tokens in turns:
        before = len(sample.tokens)
        sample.append_response_tokens(tokens=[1] * tokens, trainable=version is not None)
        if version is not None:
            note_call(sample, answer(before, tokens, [version]), tokens)
    return sample


def judge(groups, policy, bound, trainer_at=3):
    return apply_staleness(groups, policy=policy, bound=bound, trainer_at=trainer_at, args=ARGS)


@pytest.mark.parametrize(
    ("more", "rollout_id", "first", "expected"),
    [
        ({}, 0, 0, 1),  # one publication before the first rollout
        ({}, 5, 0, 6),
        ({}, 5, 3, 3),  # a resumed run counts from 1 again
        ({"update_weight_start_version": 4}, 5, 3, 7),
        ({"update_weight_mode": "delta"}, 5, 0, 5),  # the first is the baseline
        ({"reef_asynchronous": True, "update_weights_interval": 1}, 5, 0, 6),
        ({"reef_asynchronous": True, "update_weights_interval": 2}, 5, 0, 3),  # after steps 1 and 3
        ({"reef_asynchronous": True, "update_weights_interval": 2}, 6, 0, 4),
        ({"reef_asynchronous": True, "update_weights_interval": 2}, 4, 3, 2),  # after step 3
        ({"reef_asynchronous": True, "update_weights_interval": 2, "release_train": True}, 5, 0, 6),
        ({"update_weights_interval": 2}, 5, 0, 6),  # train.py doesn't look at it
        ({"debug_rollout_only": True}, 5, 0, 0),
    ],
)
def test_where_the_trainer_stands(more, rollout_id, first, expected):
    assert trainer_version(SimpleNamespace(**more), rollout_id, first) == expected


def test_the_trainer_s_version_equals_a_count_of_slime_s_loop():
    for interval in (1, 2, 3):
        for first in range(4):
            published = 1
            for rollout_id in range(first, 12):
                args = SimpleNamespace(reef_asynchronous=True, update_weights_interval=interval)
                assert trainer_version(args, rollout_id, first) == published
                published += (rollout_id + 1) % interval == 0


def test_drop_removes_the_stale_and_leaves_the_rest():
    stale, fresh, other = rollout(("1", 2), ("3", 2)), rollout(("3", 4), index=1), rollout(("2", 4), index=2)
    decisions = judge([[stale, fresh, other]], "drop", bound=1)
    assert [d.label for d in decisions] == ["drop_lag_over_bound", "train_within_bound", "train_within_bound"]
    assert [s.remove_sample for s in (stale, fresh, other)] == [True, False, False]
    assert stale.loss_mask == [1] * 4
    assert stale.metadata[METADATA_KEY]["staleness"] == {
        "action": "drop",
        "reason": "lag_over_bound",
        "lag_max": 2,
        "lag_mean": 1.0,
        "tokens": 4,
        "tokens_over_bound": 2,
    }


def test_a_group_of_which_one_is_left_is_dropped_whole():
    stale, fresh = rollout(("1", 2)), rollout(("3", 4), index=1)
    assert [d.reason for d in judge([[stale, fresh]], "drop", bound=1)] == ["lag_over_bound", "group_too_small"]
    assert fresh.remove_sample


def test_mask_takes_the_loss_of_stale_tokens_only():
    sample = rollout(("1", 2), (None, 3), ("3", 2))
    judge([[sample, rollout(("3", 1), index=1)]], "mask_tokens", bound=1)
    assert sample.loss_mask == [0, 0, 0, 0, 0, 1, 1]
    assert not sample.remove_sample


def test_correct_leaves_samples_as_they_are_and_counts():
    sample = rollout(("1", 2), ("3", 2))
    assert [d.label for d in judge([[sample]], "correct", bound=1)] == ["correct_lag_over_bound"]
    assert (sample.loss_mask, sample.remove_sample) == ([1] * 4, False)


def test_without_a_bound_nothing_is_stale():
    sample = rollout(("1", 2))
    assert [d.action for d in judge([[sample]], "drop", bound=None, trainer_at=100)] == ["train"]


def test_rollouts_that_were_split_into_several_samples_are_judged_with_their_group():
    part, rest, other = rollout(("1", 2)), rollout(("3", 2)), rollout(("3", 2), index=1)
    decisions = judge([[[part, rest], [other]]], "drop", bound=1)
    assert [d.action for d in decisions] == ["drop", "train", "train"]


def test_trained_tokens_that_no_call_accounts_for_count_as_the_oldest():
    sample = rollout(("3", 2))
    sample.append_response_tokens(tokens=[1, 1])  # a stream that was cut off
    note_call_free = rollout(("3", 2), index=1)
    judge([[sample, note_call_free]], "mask_tokens", bound=2)
    assert sample.loss_mask == [1, 1, 0, 0]


def test_a_bound_without_any_spans_is_an_error_that_says_what_to_look_at():
    sample = FakeSample(tokens=[0] * PROMPT)
    sample.append_response_tokens(tokens=[1, 1])
    with pytest.raises(StalenessError, match="no rollout says which weights sampled it: is the hook kv_spans active"):
        judge([[sample]], "drop", bound=1)
    assert judge([[sample]], "drop", bound=None)[0].action == "train"


def test_engines_that_serve_what_the_trainer_has_not_published_are_named():
    with pytest.raises(StalenessError, match=r"rollout g00002/7 was sampled by version 4, 1 ahead of the trainer"):
        judge([[rollout(("4", 1), group=2, index=7)]], "drop", bound=1)
    with pytest.raises(StalenessError, match="version 'mine', which this trainer never published"):
        judge([[rollout(("mine", 1))]], "drop", bound=1)


def test_the_weights_that_engines_start_with_are_the_first_version():
    assert judge([[rollout(("default", 2))]], "correct", bound=None, trainer_at=1)[0].lag.max == 1


turn = st.tuples(st.sampled_from([None, "0", "1", "2", "3"]), st.integers(1, 5))


@given(st.lists(turn, min_size=1, max_size=6), st.integers(0, 3))
def test_the_mask_equals_a_plain_recount(turns, bound):
    if all(version is None for version, _ in turns):
        turns = [*turns, ("3", 1)]
    sample = rollout(*turns)
    judge([[sample]], "mask_tokens", bound=bound)
    expected = [
        int(version is not None and 3 - int(version) <= bound) for version, tokens in turns for _ in range(tokens)
    ]
    assert sample.loss_mask == expected
