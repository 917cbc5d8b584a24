"""`train` leaves a report also where it ends early. No engine: the fleet fails to start."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from slime_backend.config import make_config
from slime_backend.local_trainer import loop
from slime_backend.report import write


def test_a_run_that_ends_early_still_has_its_report(tmp_path, monkeypatch, run_async):
    @asynccontextmanager
    async def no_fleet(*args, **kwargs):
        raise OSError("no engine")
        yield

    monkeypatch.setattr(loop, "running_fleet", no_fleet)
    monkeypatch.setattr(write, "plotly_source", lambda: "/* plotly */")
    config = make_config({"wandb": "disabled", "models_dir": str(tmp_path / "models")}, "test")
    run_dir, log_lines = tmp_path / "run", []
    with pytest.raises(OSError, match="no engine"):
        run_async(loop.train(config, run_dir, resume=False, reporter=loop.Reporter(log=log_lines.append)))
    assert log_lines[-1] == f"report: {run_dir / 'report.html'}"
    assert "The run was interrupted" in (run_dir / "report.html").read_text()
