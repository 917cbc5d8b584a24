"""Where a run's metrics go: Weights & Biases, TensorBoard or nowhere. Training goes on without it.

    Tracker     what the run talks to; any failure of the writer is logged once and ends the logging, never the training
    Writer      one service: wandb_writer.py, tensorboard_writer.py

Each family of metrics has its own step, so that a global step, which may only grow, can't drop rows when a run is
resumed or when families are logged at different rates. The names are listed in docs/runs.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from slime_backend.provenance.records import RolloutRecord
from slime_backend.tracking.alerts import Alert

log = logging.getLogger(__name__)

Kind = Literal["wandb", "tensorboard", "none"]
Mode = Literal["offline", "online", "disabled"]  # of W&B

STEP_METRICS = {"train": "train/step", "rollout": "rollout/step", "publication": "publication/index"}
TABLE_ROWS = 500  # of the rollout table; the whole record is the ledger
TABLE_COLUMNS = (
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
)


class Writer(Protocol):
    """One service. Every method may raise anything."""

    directory: str | None  # of its files

    def log(self, family: str, step: int, row: Mapping[str, float | int]) -> None:
        """`row`: full names, e.g. train/loss."""

    def alert(self, alert: Alert) -> None: ...

    def finish(self, summary: Mapping[str, Any], table: Sequence[tuple[Any, ...]]) -> None:
        """Last call. `table`: rows of TABLE_COLUMNS."""


class Tracker:
    """Logs to one writer.

    Tracker(lambda: WandbWriter(...), "W&B"), or Tracker(None) for none. Usually made by `make_tracker`.
    """

    def __init__(self, make: Callable[[], Writer] | None, name: str = "", extra: str = "") -> None:
        """`extra`: the extra of the package that installs what the writer needs."""
        self._name, self._extra = name, extra
        self._table: list[tuple[Any, ...]] = []
        self._writer: Writer | None = None
        if make is not None:
            self._writer = self._guard(make)
        self.directory = self._writer.directory if self._writer is not None else None

    def log(self, family: str, step: int, values: Mapping[str, float | int | None]) -> None:
        """Log one row of a family in STEP_METRICS; None values are left out."""
        row = {f"{family}/{key}": value for key, value in values.items() if value is not None}
        self._tell(lambda writer: writer.log(family, step, row))

    def alert(self, alerts: Sequence[Alert]) -> None:
        def deliver(writer: Writer) -> None:
            for alert in alerts:
                writer.alert(alert)

        self._tell(deliver)

    def add_rollouts(self, records: Sequence[RolloutRecord], answers: Sequence[str], lags: Sequence[int]) -> None:
        """Rows for the rollout table, which is written at the end."""
        for record, answer, lag in zip(records, answers, lags, strict=True):
            if len(self._table) >= TABLE_ROWS:
                return
            versions = " ".join(record.versions)
            where = (record.receipt, record.group, record.engine, record.question, answer, record.reward)
            self._table.append((*where, record.rollout_class, versions, record.retractions, lag))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._tell(lambda writer: writer.finish(summary, self._table))
        self._writer = None

    def _tell(self, action: Callable[[Writer], object]) -> None:
        writer = self._writer
        if writer is not None:
            self._guard(lambda: action(writer))

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Run `action`. A service may fail in any way (no network, full disk, its own bugs): none of them is the
        run's."""
        try:
            return action()
        except ModuleNotFoundError as error:
            log.warning(
                "%s is off for this run: %s is not installed; pip install 'reef-slime[%s]'",
                self._name,
                error.name,
                self._extra,
            )
        except Exception as error:
            log.warning("%s failed and is off for the rest of the run: %s: %s", self._name, type(error).__name__, error)
        self._writer = None
        return None


def make_tracker(
    kind: Kind, run_dir: Path, *, mode: Mode, project: str, name: str, settings: Mapping[str, Any], artifacts: bool
) -> Tracker:
    """The tracker of a run. `mode`, `project` and `artifacts` are for W&B."""
    if kind == "tensorboard":

        def tensorboard() -> Writer:
            from slime_backend.tracking.tensorboard_writer import TensorBoardWriter

            return TensorBoardWriter(run_dir, settings)

        return Tracker(tensorboard, "TensorBoard", "tensorboard")
    if kind == "none" or mode == "disabled":
        return Tracker(None)

    def wandb() -> Writer:
        from slime_backend.tracking.wandb_writer import WandbWriter

        return WandbWriter(run_dir, mode=mode, project=project, name=name, settings=settings, with_artifacts=artifacts)

    return Tracker(wandb, "W&B", "wandb")


def plain_figures(summary: Mapping[str, Any]) -> dict[str, int | float | str | bool]:
    """The summary's plain values, and its counts by class and by staleness decision under names of their own."""
    counts = {
        f"{family}/{name}": count
        for family, key in (("rollout_class", "rollout_classes"), ("staleness", "staleness"))
        for name, count in (summary.get(key) or {}).items()
    }
    return {k: v for k, v in {**summary, **counts}.items() if isinstance(v, int | float | str | bool)}
