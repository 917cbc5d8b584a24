"""A run in TensorBoard: metrics under the same names as in W&B, the rollout table and alerts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_backend.tracking.alerts import Alert
from slime_backend.tracking.tracker import TABLE_COLUMNS, plain_figures

SHOWN_ROWS = 100  # a text of more is slow to show


class TensorBoardWriter:
    """See tracker.Writer. Files go to `tensorboard/` of the run; a resumed run adds one."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import tensorboard  # noqa: F401  torch's own message without it doesn't name it as missing
        from torch.utils.tensorboard.writer import SummaryWriter

        self.directory: str | None = str(run_dir / "tensorboard")
        self._writer: Any = SummaryWriter(self.directory)
        self._alerts = 0
        self._text("settings", _markdown(("key", "value"), settings.items()))

    def log(self, family: str, step: int, row: Mapping[str, float | int]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill loses nothing that was logged

    def alert(self, alert: Alert) -> None:
        self._alerts += 1
        self._text("alerts", f"{alert.level}: {alert.title}: {alert.text}", self._alerts)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any], table: Sequence[tuple[Any, ...]]) -> None:
        self._text("summary", _markdown(("figure", "value"), plain_figures(summary).items()))
        self._text("rollouts", _markdown(TABLE_COLUMNS, table[:SHOWN_ROWS]))
        self._writer.close()

    def _text(self, name: str, text: str, step: int = 0) -> None:
        self._writer.add_text(name, text, step)


def _markdown(columns: Sequence[str], rows: Any) -> str:
    """A table; what would end a cell or a row is replaced."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(str(c).replace("|", "¦").split()) for c in line) + " |" for line in lines
    )
