"""A run in Weights & Biases: metrics, the rollout table, alerts, and on request artifacts that refer to its files.

W&B 0.30 and 0.31 lose what an offline run recorded last, now and then: their service ends without writing its buffer.
So what an offline run gets is kept in a file, the last of it is looked for in W&B's, and where it is missing everything
is logged once more. A killed run loses what its service held (it writes blocks of 32 KiB): a resumed run logs every row
of its own files again, in the same order, so its file is complete and agrees with the earlier one row by row.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime_backend.ledger.files import list_segments
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.tracking.alerts import Alert
from slime_backend.tracking.tracker import STEP_METRICS, TABLE_COLUMNS, plain_figures

ARTIFACT_S = 60  # to wait for an artifact to be stored, online
END = "reef/recorded_to_its_end"  # of the summary: the last thing that is written to a run
TIMES = 8  # that everything is logged to an offline run
WRITTEN_S = 1.0  # after a run's end


class WandbWriter:
    """See tracker.Writer."""

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: Literal["offline", "online"],
        project: str,
        name: str,
        settings: Mapping[str, Any],
        with_artifacts: bool = False,
    ) -> None:
        import wandb

        self._wandb, self._files, self._name = wandb, RunDir(run_dir), name
        self._online, self._with_artifacts = mode == "online", with_artifacts
        id_file = self._files.wandb_id
        known = id_file.read_text(errors="replace").strip() if id_file.is_file() else ""
        run_id = known if known.isalnum() else wandb.sdk.lib.runid.generate_id()  # empty after a power cut
        id_file.write_text(run_id + "\n")  # a resumed run goes on in the same W&B run
        self._init: dict[str, Any] = {
            "project": project,
            "name": name,
            "id": run_id,
            "mode": mode,
            "config": dict(settings),
        }
        self._kept = None if self._online else self._files.wandb_rows.open("w")
        self._last: list[Callable[[Any], None]] = []  # of the run's end
        self._run = self._begin(run_dir)
        self._there = self._rows_there()
        self.directory: str | None = str(Path(self._run.dir).parent)

    def _begin(self, folder: Path) -> Any:
        quiet = self._wandb.Settings(silent=True, console="off")
        run = self._wandb.init(**self._init, resume="allow", dir=str(folder), settings=quiet)
        for family, step in STEP_METRICS.items():
            run.define_metric(step)
            run.define_metric(f"{family}/*", step_metric=step)
        return run

    def _keep(self, kind: str, content: Mapping[str, Any]) -> None:
        """On disk, not in memory: a run may log a hundred thousand steps."""
        if self._kept is not None:
            self._kept.write(json.dumps({kind: content}) + "\n")

    def _at_the_end(self, what: Callable[[Any], None]) -> None:
        self._last.append(what)
        what(self._run)

    def _rows_there(self) -> dict[str, int]:
        """Online, the last step of each family that W&B's server has of this run: a resumed run logs all its rows once
        more, since a kill loses some."""
        if not (self._online and self._run.resumed):
            return {}
        last = {family: self._run.summary.get(step) for family, step in STEP_METRICS.items()}
        return {family: int(step) for family, step in last.items() if isinstance(step, int | float)}

    def log(self, family: str, step: int, row: Mapping[str, float | int]) -> None:
        if step <= self._there.get(family, -1):
            return
        content = {STEP_METRICS[family]: step, **row}
        self._keep("row", content)
        self._run.log(content)

    def alert(self, alert: Alert) -> None:
        content = {"title": alert.title, "text": alert.text, "level": alert.level}
        self._keep("alert", content)
        self._run.alert(**content)

    def finish(self, summary: Mapping[str, Any], table: Sequence[tuple[Any, ...]]) -> None:
        """Raises OSError where W&B's file is not whole after several attempts."""
        columns, rows = list(TABLE_COLUMNS), [list(row) for row in table]
        figures = {**plain_figures(summary), END: True}
        try:
            self._at_the_end(lambda run: run.log({"rollouts": self._wandb.Table(columns=columns, data=rows)}))
            if self._with_artifacts:
                self._at_the_end(self._log_artifacts)
            self._at_the_end(lambda run: run.summary.update(figures))
        finally:
            self._run.finish()
        if self._kept is not None:
            self._kept.close()
            self._make_whole(Path(str(self.directory)))
            self._files.wandb_rows.unlink(missing_ok=True)

    def _make_whole(self, directory: Path) -> None:
        for _ in range(TIMES - 1):
            if _is_whole(directory):
                return
            with tempfile.TemporaryDirectory(dir=self._files.path, prefix=".wandb-") as again:
                run = self._begin(Path(again))
                self._log_kept(run)
                for what in self._last:
                    what(run)
                run.finish()
                shutil.rmtree(directory)
                shutil.move(Path(run.dir).parent, directory)
        if not _is_whole(directory):
            raise OSError(f"W&B left {directory} without what was written last; the run's own files have all of it")

    def _log_kept(self, run: Any) -> None:
        with self._files.wandb_rows.open() as kept:
            for line in kept:
                content = json.loads(line)
                if "row" in content:
                    run.log(content["row"])
                else:
                    run.alert(**content["alert"])

    def _log_artifacts(self, run: Any) -> None:
        """Per step, the rollouts that were trained on and the weight version that came of them.

        Artifacts refer to the run's files and copy nothing. Every version names its rollouts in `trained_on`; W&B's own
        lineage comes from using an artifact, which it allows online only.
        """
        segments = [s.path for s in list_segments(self._files.path) if s.path.exists()]
        for row in read_jsonl(self._files.steps):
            step, version = row["step"], f"v{row['step']}"
            weights = self._files.weights(version)
            if not weights.is_dir():
                continue
            trained_on = f"{self._name}-rollouts-{version}"
            facts = {"step": step, "receipts": row.get("receipts", [])}
            rollouts = self._wandb.Artifact(trained_on, type="rollouts", metadata=facts)
            for path in segments:
                rollouts.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
            logged = run.log_artifact(rollouts)
            if self._online:
                run.use_artifact(logged.wait(timeout=ARTIFACT_S))
            made = self._wandb.Artifact(
                f"{self._name}-weights-{version}",
                type="model",
                metadata={"weight_version": version, "step": step, "trained_on": trained_on},
            )
            made.add_reference(weights.resolve().as_uri(), checksum=False)
            run.log_artifact(made)


def _is_whole(directory: Path) -> bool:
    """Whether the file of an offline run has what was written last; it may come a moment after the run's end."""
    until = time.monotonic() + WRITTEN_S
    while not any(_holds(file, END.encode()) for file in directory.glob("*.wandb")):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _holds(file: Path, text: bytes) -> bool:
    """Whether the file has these bytes, without reading it into memory."""
    with contextlib.suppress(ValueError), file.open("rb") as opened:  # an empty file can't be mapped
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ).rfind(text) >= 0
    return False
