"""Puts our rollout functions behind slime's `--*-path` flags; those that a user gave are called by ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slime_backend.engine_process import ORIGINAL_LOGPROB
from slime_backend.policy import PolicyError
from slime_backend.run_files.runs import new_run_dir

ROLLOUTS = "slime_backend.slime_hooks.rollouts"
CORRECT = "slime_backend.slime_hooks.importance.correct"


def set_rollout_functions(args: Any, *, asynchronous: bool) -> None:
    """Set the flags of a parsed command line, in the driver, before slime's loop starts. `asynchronous`: train_async.

    Writes `rollout_function_path`, `rollout_sample_hook_path`, `custom_rollout_log_function_path`, and for `--staleness
    correct` with a bound `use_tis` and `custom_tis_function_path`; what stood there before goes to `reef_*`. Also makes
    `reef_run_dir` absolute, and a new one where it holds a run.

    Raises PolicyError where the flags contradict each other.
    """
    if args.staleness != "correct" and args.max_version_lag is None:
        raise PolicyError(f"--staleness {args.staleness} does nothing without a bound; give --max-version-lag as well")
    temperature = float(getattr(args, "rollout_temperature", 1.0))
    if temperature != 1.0 and os.environ.get(ORIGINAL_LOGPROB, "").lower() in ("1", "true"):
        raise PolicyError(
            f"{ORIGINAL_LOGPROB} is set and --rollout-temperature is {temperature:g}: SGLang would return log-probs at "
            f"temperature 1, and the trainer computes them at {temperature:g}; unset it"
        )
    args.reef_asynchronous = asynchronous
    args.reef_run_dir = str(new_run_dir(_wanted_run_dir(args)))
    args.reef_rollout_function_path = args.rollout_function_path
    args.rollout_function_path = f"{ROLLOUTS}.generate_rollout"
    args.rollout_sample_hook_path = [*(args.rollout_sample_hook_path or ()), f"{ROLLOUTS}.note_rollout"]
    args.reef_rollout_log_function_path = args.custom_rollout_log_function_path
    args.custom_rollout_log_function_path = f"{ROLLOUTS}.log_rollouts"
    if args.max_version_lag is not None and args.staleness == "correct":
        _set_correction(args)


def _set_correction(args: Any) -> None:
    if args.use_rollout_logprobs:
        raise PolicyError(
            "--staleness correct weighs the trainer's log-probs against the rollout's, and --use-rollout-logprobs "
            "leaves the former out. Ways out: remove --use-rollout-logprobs; or --staleness mask_tokens; or drop"
        )
    if args.custom_tis_function_path not in (None, CORRECT):
        raise PolicyError(
            f"--staleness correct and --custom-tis-function-path {args.custom_tis_function_path} both set the "
            "importance weights; remove one of them"
        )
    args.use_tis = True
    args.custom_tis_function_path = CORRECT


def _wanted_run_dir(args: Any) -> Path:
    if args.reef_run_dir:
        return Path(args.reef_run_dir).resolve()
    return (Path(args.save) / "reef" if args.save else Path("runs") / "slime").resolve()
