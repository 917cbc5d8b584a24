"""A run in Weights & Biases: metrics, the rollout table, alerts, and on request artifacts that refer to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime_backend.provenance.alerts import Alert
from slime_backend.provenance.jsonl import read_jsonl
from slime_backend.provenance.segments import list_segments
from slime_backend.provenance.tracker import STEP_METRICS, TABLE_COLUMNS, plain_figures

ARTIFACT_S = 60  # to wait for an artifact to be stored, online


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

        self._wandb, self._run_dir, self._name = wandb, run_dir, name
        self._online, self._with_artifacts = mode == "online", with_artifacts
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.is_file() else wandb.sdk.lib.runid.generate_id()
        id_file.write_text(run_id + "\n")  # a resumed run goes on in the same W&B run
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(run_dir),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.directory: str | None = str(Path(self._run.dir).parent)
        for family, step in STEP_METRICS.items():
            self._run.define_metric(step)
            self._run.define_metric(f"{family}/*", step_metric=step)

    def log(self, family: str, step: int, row: Mapping[str, float | int]) -> None:
        self._run.log({STEP_METRICS[family]: step, **row})

    def alert(self, alert: Alert) -> None:
        self._run.alert(title=alert.title, text=alert.text, level=alert.level)

    def finish(self, summary: Mapping[str, Any], table: Sequence[tuple[Any, ...]]) -> None:
        self._run.log({"rollouts": self._wandb.Table(columns=list(TABLE_COLUMNS), data=[list(row) for row in table])})
        for key, value in plain_figures(summary).items():
            self._run.summary[key] = value
        try:
            if self._with_artifacts:
                self._log_artifacts()
        finally:
            self._run.finish()

    def _log_artifacts(self) -> None:
        """Per step, the rollouts that were trained on and the weight version that came of them.

        Artifacts refer to the run's files and copy nothing. Every version names its rollouts in `trained_on`; W&B's own
        lineage comes from using an artifact, which it allows online only.
        """
        segments = [s.path for s in list_segments(self._run_dir) if s.path.exists()]
        for row in read_jsonl(self._run_dir / "steps.jsonl"):
            step, version = row["step"], f"v{row['step']}"
            weights = self._run_dir / "weights" / version
            if not weights.is_dir():
                continue
            trained_on = f"{self._name}-rollouts-{version}"
            facts = {"step": step, "receipts": row.get("receipts", [])}
            rollouts = self._wandb.Artifact(trained_on, type="rollouts", metadata=facts)
            for path in segments:
                rollouts.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
            logged = self._run.log_artifact(rollouts)
            if self._online:
                self._run.use_artifact(logged.wait(timeout=ARTIFACT_S))
            made = self._wandb.Artifact(
                f"{self._name}-weights-{version}",
                type="model",
                metadata={"weight_version": version, "step": step, "trained_on": trained_on},
            )
            made.add_reference(weights.resolve().as_uri(), checksum=False)
            self._run.log_artifact(made)
