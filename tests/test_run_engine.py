"""Whole runs on real engines: the main job, its counter-proof, an interruption and the real small model.

Sizes are small; the demo's own figures come from `make demo`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.needs import needs_deepspeed
from tests.processes import wait_gone

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def command(config, runs, models, *settings, resume=None):
    pairs = [f"runs_dir={runs}", f"models_dir={models}", *settings]
    more = ["--resume", str(resume)] if resume else []
    return [
        *(sys.executable, "-m", "slime_backend.cli", "train", str(ROOT / "configs" / config)),
        *(x for pair in pairs for x in ("--set", pair)),
        *more,
    ]


def finish(args, timeout=580):
    return subprocess.run(args, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


# Few requests run at once and the others wait behind them, so that the trainer waits for the engines: where engines are
# fast and the disk is slow, too, a publication meets requests in flight.
FULL = 'engine_flags=["--max-running-requests", "4"]'
SMALL = ("steps=4", "groups_per_step=6", "samples_per_group=4", "groups_ahead=6", "max_total_tokens=40000", FULL)


def test_the_main_job_small(tmp_path, models_dir):
    done = finish(command("cpu_tiny.yaml", tmp_path, models_dir, *SMALL, "name=small", "audit_rollouts=60"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "small" / "summary.json").read_text())
    assert summary["completed"]
    assert (summary["steps"], summary["publications"], summary["engines_confirmed_each"]) == (4, 4, [2])
    assert summary["flushes_verified"] == 8
    assert summary["publications_with_retractions"] >= 3
    assert summary["rollouts_submitted"] == summary["rollouts_completed"] > 4 * 24
    assert summary["rollouts_lost"] == summary["rollouts_doubled"] == summary["rollouts_aborted"] == 0
    assert summary["prefix_hit_rate_within_version"] > 0.9
    assert summary["first_after_publication"] >= 6
    assert summary["cached_tokens_first_after_publication_max"] == 0
    assert summary["rollout_classes"]["carried"] == 0
    assert summary["rollout_classes"]["mixed"] > 0
    assert summary["staleness"]["train_within_bound"] == 4 * 24
    assert summary["audit"]["rollouts"] == 60
    assert summary["audit"]["violations"] == 0
    assert summary["audit"]["max_abs_logprob_diff"] < 1e-4
    assert summary["audit"]["crossing"] > 0
    assert summary["peak_rss_gib"] > 1
    # The W&B run is there, with a history and the table of rollouts.
    run = Path(summary["wandb_run_dir"])
    assert next(run.glob("*.wandb")).stat().st_size > 1000
    assert list(run.rglob("*rollouts*.table.json"))


@pytest.mark.soak
def test_the_main_job_scoped(tmp_path, models_dir):
    """Nothing is retracted, what is in flight crosses with its KV, and the audit of the carried context holds.

    Stale tokens are masked, and the rollouts outgrow one segment; the audit follows them beside the run.
    """
    settings: tuple[str, ...] = (*SMALL, "name=scoped", "disjoint_prefix_sharing=scoped", "engines=1", "wandb=disabled")
    settings = (*settings, "staleness=mask_tokens", "max_version_lag=0", "rollouts_segment_mib=0.2")
    settings = (*settings, "audit_beside=true", "audit_rollouts=100")  # 86 find one contaminated in 20 of these
    done = finish(command("cpu_tiny.yaml", tmp_path, models_dir, *settings))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "scoped" / "summary.json").read_text())
    assert (summary["sweeps_verified"], summary["flushes_verified"], summary["requests_retracted"]) == (4, 0, 0)
    assert summary["rollouts_lost"] == summary["rollouts_doubled"] == summary["rollouts_aborted"] == 0
    assert summary["rollouts_mixed"] > 0
    classes = summary["rollout_classes"]
    assert sum(classes.values()) == summary["rollouts_completed"]
    assert classes["carried"] > 0
    assert classes["recomputed"] == classes["mixed"] == 0
    staleness = summary["staleness"]
    assert staleness["tokens_masked"] > staleness["mask_lag_over_bound"] > 0
    decided = [json.loads(line) for line in (tmp_path / "scoped" / "staleness.jsonl").open()]
    assert len(decided) == staleness["mask_lag_over_bound"]
    assert len(list((tmp_path / "scoped" / "rollouts").glob("*.parquet"))) > 1
    assert summary["cached_tokens_first_after_publication_max"] == 0
    assert summary["prefix_hit_rate_within_version"] > 0.9
    assert summary["audit"]["violations"] == 0
    assert summary["audit"]["crossing"] > 0
    assert summary["audit"]["finished"]
    assert summary["audit"]["verdict"]["outcome"] == "clean"


def test_counter_proof_without_the_protection_the_audit_fails_and_names_the_rollouts(tmp_path, models_dir):
    """The same run with the radix cache on, an in-place pause and no flush: the audit must be able to fail.

    Here it goes on beside the training."""
    args = command(
        *("cpu_tiny.yaml", tmp_path, models_dir, *SMALL),
        *("name=unsafe", "disjoint_prefix_sharing=unsafe", "engines=1", "audit_rollouts=60", "wandb=disabled"),
        "audit_beside=true",
    )
    done = finish(args)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "warning: disjoint_prefix_sharing=unsafe" in done.stderr
    summary = json.loads((tmp_path / "unsafe" / "summary.json").read_text())
    audit = summary["audit"]
    assert audit["violations"] > 10
    assert audit["rollouts"] > 60
    assert audit["verdict"]["outcome"] == "contaminated"
    assert "stale prefix" in audit["verdict"]["text"]
    assert "made now" not in done.stdout
    assert audit["max_abs_logprob_diff"] > 1e-3
    recorded = {json.loads(line)["receipt"] for line in (tmp_path / "unsafe" / "rollouts.jsonl").open()}
    assert set(audit["violated"]) <= recorded
    assert summary["cached_tokens_first_after_publication_max"] > 1000  # the old prefix, served as new
    again = subprocess.run(
        [sys.executable, "-m", "slime_backend.cli", "audit", str(tmp_path / "unsafe"), "--rollouts", "12"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.returncode == 1
    assert "violation: " in again.stdout


@pytest.mark.soak
def test_interrupted_and_resumed(tmp_path, models_dir):
    """Ctrl-C writes a partial summary and ends the engines; --resume goes on from the last checkpoint."""
    settings = (*SMALL, "name=cut", "audit_rollouts=60", "engines=1")
    process = subprocess.Popen(
        command("cpu_tiny.yaml", tmp_path, models_dir, *settings), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   2/"):
            break
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(120) == 130
    assert wait_gone([p.pid for p in tree]) == []
    partial = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert not partial["completed"]
    assert 2 <= partial["steps"] <= 3

    done = finish(command("cpu_tiny.yaml", tmp_path, models_dir, *settings, resume=tmp_path / "cut"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["completed"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "steps.jsonl").open()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4
    assert summary["audit"]["violations"] == 0
    assert summary["rollouts_doubled"] == 0


@pytest.mark.soak
@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "processes", "transport"), [(2, 1, "disk"), (3, 2, "distributed")], ids=["zero2", "zero3"]
)
def test_deepspeed_as_the_trainer(tmp_path, models_dir, stage, processes, transport):
    """Trained and published by DeepSpeed; the audit recomputes every rollout from the checkpoints that it wrote."""
    keys = (f"zero_stage={stage}", f"trainer_processes={processes}", f"transport={transport}")
    settings = (*SMALL, "name=ds", "steps=3", "wandb=disabled", "audit_rollouts=60", *keys)
    done = finish(command("cpu_tiny_deepspeed.yaml", tmp_path, models_dir, *settings))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "ds" / "summary.json").read_text())
    assert (summary["steps"], summary["engines_confirmed_each"], summary["flushes_verified"]) == (3, [2], 6)
    assert summary["rollouts_lost"] == summary["rollouts_doubled"] == summary["rollouts_aborted"] == 0
    assert summary["audit"]["violations"] == 0
    assert summary["audit"]["max_abs_logprob_diff"] < 1e-4
    assert summary["audit"]["crossing"] > 0


@pytest.mark.soak
def test_the_real_small_model(tmp_path, models_dir):
    """SmolLM2-135M-Instruct: two steps, published, audited."""
    args = command(
        *("smollm2_cpu.yaml", tmp_path, models_dir, "name=smol", "steps=2", "audit_rollouts=12", "engines=1"),
        "wandb=disabled",
    )
    done = finish(args)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "smol" / "summary.json").read_text())
    assert (summary["steps"], summary["flushes_verified"]) == (2, 2)
    assert summary["audit"]["violations"] == 0
    assert summary["reward_first3"] > 0.05  # the real model, not noise
