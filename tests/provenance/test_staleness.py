"""Lag and decisions, against counts made by hand and a plain recount."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.local_trainer.checkpoint import version_step
from slime_backend.provenance.errors import StalenessError
from slime_backend.provenance.staleness import LABELS, BatchLag, LagSpan, RolloutLag, count, decide, rollout_lag
from slime_backend.wire import Span


def lag_of(*lags: int, receipt: str = "r") -> RolloutLag:
    """One token for each lag."""
    return RolloutLag(receipt, tuple(LagSpan(i, i + 1, lag) for i, lag in enumerate(lags)))


def test_lag_per_token_rollout_and_batch_by_hand():
    lag = rollout_lag("r", [Span("v3", 0, 2), Span("v5", 2, 3), Span("v6", 3, 7)], 7, version_step)
    assert lag.per_token() == (4, 4, 2, 1, 1, 1, 1)
    assert (lag.tokens, lag.total, lag.max, lag.mean) == (7, 14, 4, 2.0)
    assert lag.beyond(1) == (1, 1, 1, 0, 0, 0, 0)
    assert lag.beyond(4) == lag.beyond(None) == (0,) * 7
    batch = BatchLag.of([lag, lag_of(0, 0, 4)])
    assert batch == BatchLag(10, 1.8, 4, {0: 2, 1: 4, 2: 1, 4: 3})
    assert BatchLag.of([]) == BatchLag(0, 0.0, 0, {})


@pytest.mark.parametrize(
    ("version", "expected"), [("v8", "1 ahead of the trainer"), ("step-7", "never published"), ("", "never published")]
)
def test_a_version_that_the_trainer_cannot_know_is_named(version, expected):
    with pytest.raises(StalenessError, match=expected):
        rollout_lag("r", [Span(version, 0, 2)], 7, version_step)


GROUPS = [
    [lag_of(0, 0, receipt="a"), lag_of(2, 0, receipt="b"), lag_of(1, 1, 1, receipt="c")],
    [lag_of(3, receipt="d"), lag_of(0, receipt="e")],
]


KEEP, DROP, SMALL = "train_within_bound", "drop_lag_over_bound", "drop_group_too_small"
MASK, CORRECT = "mask_lag_over_bound", "correct_lag_over_bound"


@pytest.mark.parametrize(
    ("policy", "bound", "labels", "tokens"),
    [
        ("drop", 2, [KEEP, KEEP, KEEP, DROP, SMALL], (2, 0, 0)),
        ("drop", 1, [KEEP, DROP, KEEP, DROP, SMALL], (4, 0, 0)),
        ("drop", 0, [SMALL, DROP, DROP, DROP, SMALL], (9, 0, 0)),
        ("mask_tokens", 1, [KEEP, MASK, KEEP, MASK, KEEP], (0, 2, 0)),
        ("correct", 0, [KEEP, CORRECT, CORRECT, CORRECT, KEEP], (0, 0, 5)),
        ("correct", None, [KEEP] * 5, (0, 0, 0)),
        ("drop", None, [KEEP] * 5, (0, 0, 0)),
    ],
)
def test_decisions_by_hand(policy, bound, labels, tokens):
    decisions = [d for group in decide(GROUPS, policy, bound) for d in group]
    assert [d.label for d in decisions] == labels
    assert [d.lag.receipt for d in decisions] == list("abcde")
    counted = count(decisions)
    assert (counted["tokens_dropped"], counted["tokens_masked"], counted["tokens_corrected"]) == tokens
    assert sum(counted[label] for label in LABELS) == 5


GROUP = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=5)


@given(st.lists(GROUP, max_size=5), st.sampled_from(["drop", "mask_tokens", "correct"]), st.none() | st.integers(0, 4))
def test_no_token_over_the_bound_is_trained_on_unseen(groups, policy, bound):
    lags = [[lag_of(*rollout) for rollout in group] for group in groups]
    decided = decide(lags, policy, bound)
    assert [len(g) for g in decided] == [len(g) for g in groups]
    for group, decisions in zip(groups, decided, strict=True):
        kept = [d for d in decisions if d.action != "drop"]
        assert not kept or len(kept) >= min(2, len(group))
        for rollout, decision in zip(group, decisions, strict=True):
            over = [int(bound is not None and lag > bound) for lag in rollout]
            assert list(decision.beyond) == over
            if any(over):
                assert decision.action == {"drop": "drop", "mask_tokens": "mask", "correct": "correct"}[policy]
            else:
                assert decision.action == "train" or decision.label == "drop_group_too_small"


def test_a_line_of_the_log():
    line = decide(GROUPS, "mask_tokens", 1)[0][1].to_json()
    assert line == {
        "receipt": "b",
        "action": "mask",
        "reason": "lag_over_bound",
        "lag_max": 2,
        "lag_mean": 1.0,
        "tokens": 2,
        "tokens_over_bound": 1,
    }


def test_it_needs_no_torch():
    code = "import sys, slime_backend.config, slime_backend.provenance.staleness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
