"""One real slime job on this machine's CPU, run as a user runs it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slime import job_guard

GUARD_S = job_guard.END_S + 10.0
DEADLINE_S = 600.0  # two minutes on two quiet cores, five to six where others work on them too
TIMED_OUT = 124
ROOT = Path(__file__).resolve().parents[2]

# Small enough for a minute, big enough for two groups a batch and for versions to be told apart.
JOB: dict[str, str] = {
    "--custom-rm-path": "slime_backend.cpu.tiny.reward",
    "--actor-num-nodes": "1",
    "--actor-num-gpus-per-node": "1",
    "--rollout-num-gpus": "1",
    "--rollout-num-gpus-per-engine": "1",
    "--num-gpus-per-node": "2",
    "--num-rollout": "2",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--rollout-max-response-len": "16",
    "--rollout-temperature": "1.0",
    "--global-batch-size": "8",
    "--micro-batch-size": "1",
    "--lr": "1e-3",
    "--lr-decay-style": "constant",
    "--optimizer": "adam",
    "--advantage-estimator": "grpo",
    "--sglang-server-concurrency": "8",
    "--sglang-log-level": "warning",
}


@dataclass(frozen=True)
class SlimeRun:
    """`returncode` is the job's, or 124 where the deadline ended it."""

    directory: Path
    returncode: int
    log: str
    wall_s: float

    def samples(self, rollout_id: int) -> list[dict[str, Any]]:
        """The saved samples of one rollout, as slime's `Sample.to_dict` gives them."""
        import torch

        path = self.directory / f"rollout_{rollout_id}.pt"
        return list(torch.load(path, weights_only=False)["samples"])

    def versions(self, rollout_id: int) -> list[list[str]]:
        """`Sample.weight_versions` of each sample."""
        return [sample["weight_versions"] for sample in self.samples(rollout_id)]

    @property
    def logprob_diffs(self) -> list[float]:
        """`train/train_rollout_logprob_abs_diff` of each training step, in order."""
        found = re.findall(r"step (\d+): .*?'train/train_rollout_logprob_abs_diff': ([0-9.e+-]+)", self.log)
        return [float(value) for _, value in sorted(found, key=lambda pair: int(pair[0]))]

    def tail(self, lines: int = 40) -> str:
        """The end of the log, for an assertion's message."""
        return "\n".join(self.log.splitlines()[-lines:])


def job_flags(model_flags: Sequence[str], directory: Path, extra: Sequence[str]) -> list[str]:
    """The job's flags; one of JOB that `extra` gives too is left to `extra`."""
    given = {word.partition("=")[0] for word in extra}
    words = [word for name, value in JOB.items() if name not in given for word in (name, value)]
    return [*model_flags, *words, "--save-debug-rollout-data", f"{directory}/rollout_{{rollout_id}}.pt", *extra]


def run_job(
    module: str,
    flags: Sequence[str],
    directory: Path,
    *,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> SlimeRun:
    """Run `python -m module` with `flags` to its end or to the deadline; nothing of it is left running.

    Its log goes to `directory`/job.log. Ray gets a short directory of its own under /tmp, since its sockets' paths may
    not exceed 107 bytes, and a token of its own.
    """
    log_path = directory / "job.log"
    ray_directory = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))
    variables = {
        **os.environ,
        "SLIME_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "RAY_TMPDIR": str(ray_directory),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "WANDB_MODE": "offline",
        **(environment or {}),
    }
    variables.pop("RAY_ADDRESS", None)
    command = [sys.executable, job_guard.__file__, sys.executable, "-m", module, *flags]
    started = time.monotonic()
    try:
        with (
            log_path.open("wb") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=variables,
                start_new_session=True,
            ) as guard,
        ):
            try:
                code = guard.wait(deadline_s)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                _end(guard)
    finally:
        shutil.rmtree(ray_directory, ignore_errors=True)
    return SlimeRun(directory, code, log_path.read_text(errors="replace"), time.monotonic() - started)


def _end(guard: subprocess.Popen[bytes]) -> None:
    """Let the guard end the tree, whatever state it is in."""
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        guard.stdin.close()
    guard.wait(GUARD_S)
