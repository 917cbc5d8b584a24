"""The audit of a run in a process of its own, beside the training.

    beside = AuditBeside(config, run_dir)
    beside.start()
    ...                            train; `beside.news()` after each step: violations found since
    audit = await beside.result()  it ends with the run; None if it failed
    beside.stop()                  however the run ended

The process has the lowest priority and one thread, reads files only, and stands behind the guard that engines stand
behind (engine_guard.py): it can't outlive the trainer, however that ends. If it fails, the training goes on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_backend.audit.audit import AuditResult, Violation
from slime_backend.audit.follow import FILE, load
from slime_backend.config import RunConfig
from slime_backend.engine_process import guard as engine_guard

LOG = "audit.log"
POLL_S = 0.2
GRACE_S = 10.0  # beyond its own deadline


class AuditBeside:
    """Starts `reef-slime audit RUN_DIR --follow` and reads what it leaves in `audit.json`. For one event loop."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._told = 0
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        settings = {
            "--rollouts": self.config.audit_rollouts,
            "--tolerance": self.config.audit_tolerance,
            "--deadline": self.config.audit_deadline_s,
            # The trainer ends it; it must not give up where one step takes long.
            "--idle": 10 * 24 * 3600,
        }
        flags = [text for name, value in settings.items() for text in (name, str(value))]
        return [sys.executable, "-m", "slime_backend.cli", "audit", str(self.run_dir), "--follow", *flags]

    def start(self) -> None:
        """Call it when the run's ledger is open: its lock says that the run goes on."""
        (self.run_dir / FILE).unlink(missing_ok=True)  # of the run before a resume
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = engine_guard.start_guarded(self.command(), environment, self.run_dir / LOG)

    def news(self) -> Sequence[Violation]:
        """Violations that were found since the last call."""
        found = load(self.run_dir)
        new = found.violations[self._told :] if found else []
        self._told += len(new)
        return new

    async def result(self) -> AuditResult | None:
        """Wait for its end, at most `audit_deadline_s` and a little; None where it failed or was late."""
        if self._process is None:
            return None
        for _ in range(int((self.config.audit_deadline_s + GRACE_S) / POLL_S)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(POLL_S)
        self.stop()
        found = load(self.run_dir)
        return found if found is not None and found.finished else None

    def why_not(self) -> str:
        """The last thing that it said."""
        lines = (self.run_dir / LOG).read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def stop(self) -> None:
        """End it, if it is still there. May be called again."""
        if self._process is not None:
            engine_guard.end_guarded(self._process)
            self._process = None
