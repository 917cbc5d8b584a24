"""A run's metrics in Weights & Biases; training goes on without it.

Each family of metrics has its own step metric, so that W&B's global step, which may only grow, can't drop rows when a
run is resumed or when families are logged at different rates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime_backend.provenance.records import RolloutRecord

log = logging.getLogger(__name__)

Mode = Literal["offline", "online", "disabled"]

STEP_METRICS = {"train": "train/step", "rollout": "rollout/step", "publication": "publication/index"}
TABLE_ROWS = 500  # of the rollout table; the whole record is rollouts.jsonl


class Tracker:
    """Logs to one W&B run. Any failure of W&B is said once and ends the logging, never the training.

    Tracker(Path("runs/x"), mode="offline", project="reef-slime", name="x", settings={...})
    """

    def __init__(self, run_dir: Path, *, mode: Mode, project: str, name: str, settings: Mapping[str, Any]) -> None:
        self._run: Any = None
        self._table: Any = None
        self._rows = 0
        self.directory: str | None = None  # of the W&B run's files
        self._on = mode != "disabled"
        self._guard(lambda: self._start(run_dir, mode, project, name, settings))

    def _start(self, run_dir: Path, mode: Mode, project: str, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

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
        self.directory = str(Path(self._run.dir).parent)
        for family, step in STEP_METRICS.items():
            self._run.define_metric(step)
            self._run.define_metric(f"{family}/*", step_metric=step)
        self._table = wandb.Table(
            columns=[
                "receipt",
                "group",
                "engine",
                "question",
                "answer",
                "reward",
                "class",
                "versions",
                "retractions",
                "lag_max",
            ]
        )

    def log(self, family: str, step: int, values: Mapping[str, float | int | None]) -> None:
        """Log one row of a family in STEP_METRICS; None values are left out."""
        row = {f"{family}/{key}": value for key, value in values.items() if value is not None}
        self._guard(lambda: self._run.log({STEP_METRICS[family]: step, **row}))

    def add_rollouts(self, records: Sequence[RolloutRecord], answers: Sequence[str], lags: Sequence[int]) -> None:
        """Rows for the rollout table, which is uploaded at the end."""
        for record, answer, lag in zip(records, answers, lags, strict=True):
            if self._rows >= TABLE_ROWS:
                return
            self._rows += 1
            row = (
                record.receipt,
                record.group,
                record.engine,
                record.question,
                answer,
                record.reward,
                record.rollout_class,
                " ".join(record.versions),
                record.retractions,
                lag,
            )
            self._guard(lambda row=row: self._table.add_data(*row))  # type: ignore[misc]

    def finish(self, summary: Mapping[str, Any]) -> None:
        def close() -> None:
            self._run.log({"rollouts": self._table})
            counts = {
                f"{family}/{name}": count
                for family, key in (("rollout_class", "rollout_classes"), ("staleness", "staleness"))
                for name, count in summary.get(key, {}).items()
            }
            for key, value in {**summary, **counts}.items():
                if isinstance(value, int | float | str | bool):
                    self._run.summary[key] = value
            self._run.finish()

        self._guard(close)
        self._on = False

    def _guard(self, action: Callable[[], object]) -> None:
        """Run `action`. W&B may fail in any way (no network, full disk, its own bugs): none of them is the run's."""
        if not self._on:
            return
        try:
            action()
        except Exception as error:
            self._on = False
            log.warning("W&B failed and is off for the rest of the run: %s: %s", type(error).__name__, error)
