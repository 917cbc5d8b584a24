"""`--reef-keep-versions`, and the one setting of SGLang that makes slime's log-probs another temperature's."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from slime_backend.arguments import _at_least_two
from slime_backend.engine_process import ORIGINAL_LOGPROB
from slime_backend.policy import PolicyError
from slime_backend.slime_hooks.rollouts.flags import set_rollout_functions
from slime_backend.slime_hooks.weights.saved_weights import remove_old


@pytest.mark.parametrize(("keep", "gone"), [(None, []), (2, ["1", "2", "3"]), (9, [])])
def test_the_last_versions_and_the_base_stay(tmp_path, keep, gone):
    for name in ("default", "1", "2", "3", "4", "5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert remove_old(tmp_path, 5, keep) == gone
    assert {p.name for p in tmp_path.iterdir()} == {"default", "1", "2", "3", "4", "5"} - set(gone)


def test_one_version_is_too_few():
    assert _at_least_two("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="too few"):
        _at_least_two("1")


def args(tmp_path, temperature):
    return SimpleNamespace(
        staleness="correct",
        max_version_lag=None,
        reef_run_dir=str(tmp_path / "run"),
        rollout_function_path="f",
        rollout_sample_hook_path=None,
        custom_rollout_log_function_path=None,
        rollout_temperature=temperature,
    )


@pytest.mark.parametrize(
    ("temperature", "setting", "refused"), [(0.6, "true", True), (0.6, "1", True), (1.0, "1", False), (0.6, "0", False)]
)
def test_log_probs_at_temperature_1_are_refused_where_slime_computes_them_at_another(
    tmp_path, monkeypatch, temperature, setting, refused
):
    monkeypatch.setenv(ORIGINAL_LOGPROB, setting)
    if refused:
        with pytest.raises(PolicyError, match=f"{ORIGINAL_LOGPROB} is set and --rollout-temperature is 0.6"):
            set_rollout_functions(args(tmp_path, temperature), asynchronous=False)
    else:
        set_rollout_functions(args(tmp_path, temperature), asynchronous=False)
