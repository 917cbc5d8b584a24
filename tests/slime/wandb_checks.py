"""What the W&B file and the last lines of a slime job must hold."""

from __future__ import annotations

from pathlib import Path

from slime_backend.run_files.jsonl import read_jsonl
from tests.slime.jobs import SlimeRun
from tests.waiting import wait_until
from tests.wandb_files import has_ended, history, step_metrics


def only_wandb_file(directory: Path) -> Path:
    """The job's only .wandb file, in its only directory."""
    [file] = (directory / "wandb").rglob("*.wandb")
    return file


def assert_w_and_b_is_complete(run: SlimeRun, *, steps: int) -> None:
    """One closed run on one axis: a row for each publication of publications.jsonl, and for each training step."""
    file = only_wandb_file(run.directory)
    wait_until(lambda: has_ended(file), f"{file} holds the run's end")
    rows = history(file)
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    published = [row for row in rows if "reef/publication/wall_ms" in row]
    recorded = list(read_jsonl(run.directory / "reef" / "publications.jsonl"))
    assert [row["reef/publication/version"] for row in published] == [int(report["version"]) for report in recorded]
    assert [row["rollout/step"] for row in published] == list(range(steps + 1))
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(steps))
    assert step_metrics(file)["reef/*"] == "rollout/step"
    assert has_ended(file)


def assert_closing_summary(run: SlimeRun, *, publications: int) -> None:
    """The driver's last lines are the summary; what other processes leave behind it are progress bars."""
    left = ("job_guard: ", " pid=", "it/s]", "Completed |")
    lines = [line for line in run.log.splitlines() if line.strip() and not any(text in line for text in left)]
    last = lines[-6:]
    assert all(line.startswith("reef-slime: ") for line in last), run.tail()
    assert f"reef-slime: {publications} publications, {publications} verified on every engine" in last
    assert f"reef-slime: run directory {run.directory / 'reef'}" in last
    assert f"reef-slime: W&B in {only_wandb_file(run.directory).parent}" in last
