"""slime's own loops on the CPU through our entry points: they end, with the versions and log-probs that they should.

The control stands in the asynchronous run: its rollouts are one version behind the trainer, and the same measure that
is under 1e-3 for the current version shows it.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.timeout(900)]

SAME_WEIGHTS = 1e-3


def test_train(slime_run):
    run = slime_run()
    assert run.returncode == 0, run.tail()
    for rollout_id in range(2):
        assert run.versions(rollout_id) == [[str(rollout_id + 1)]] * 8
    assert len(run.logprob_diffs) == 2
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def test_train_async_is_one_version_behind(slime_run):
    run = slime_run("--num-rollout", "3", loop="train_async")
    assert run.returncode == 0, run.tail()
    # Rollout 0 and the one that is generated while 0 is trained on are both of version 1.
    assert [run.versions(rollout_id)[0] for rollout_id in range(3)] == [["1"], ["1"], ["2"]]
    fresh, *stale = run.logprob_diffs
    assert fresh < SAME_WEIGHTS
    assert min(stale) > SAME_WEIGHTS
