"""A run can be audited in a separate process while it trains.

    audit_process = AuditProcess(config.audit, run_dir)
    audit_process.start()
    ...                                   train; `audit_process.new_violations()` after each step
    audit = await audit_process.result()  it ends with the run; None if it failed
    audit_process.stop()                  however the run ended

The process has the lowest priority and one thread, reads files only, and runs under the same guard as the engines
(engine_process/guard.py): it can't outlive the trainer, however that ends. If it fails, the training goes on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_backend.audit.audit import AuditResult, Violation
from slime_backend.audit.follow import load
from slime_backend.config import AuditConfig
from slime_backend.engine_process import guard as engine_guard
from slime_backend.run_files import RunDir

POLL_S = 0.2
GRACE_S = 10.0  # that the process gets beyond its own deadline


class AuditProcess:
    """This class runs `reef-slime audit RUN_DIR --follow` and reads what it leaves in `audit.json`.

    Use it from one event loop.
    """

    def __init__(self, config: AuditConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._reported = 0
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        settings = {
            "--rollouts": self.config.rollouts,
            "--tolerance": self.config.tolerance,
            "--deadline": self.config.deadline_s,
            # The trainer ends it; it must not give up where one step takes long.
            "--idle": 10 * 24 * 3600,
        }
        flags = [text for name, value in settings.items() if value is not None for text in (name, str(value))]
        return [sys.executable, "-m", "slime_backend.cli", "audit", str(self.run_dir), "--follow", *flags]

    def start(self) -> None:
        """Start the process; call it when the run's ledger is open, whose lock shows that the run goes on."""
        RunDir(self.run_dir).audit.unlink(missing_ok=True)  # left by the run before a resume
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = engine_guard.start_guarded(self.command(), environment, RunDir(self.run_dir).audit_log)

    def new_violations(self) -> Sequence[Violation]:
        """Return the violations that were found since the last call."""
        found = load(self.run_dir)
        new = found.violations[self._reported :] if found else []
        self._reported += len(new)
        return new

    async def result(self) -> AuditResult | None:
        """Wait for the process to end, `audit_deadline_s` and a little at most; None where it failed or was late."""
        if self._process is None:
            return None
        for _ in range(int((self.config.deadline_s + GRACE_S) / POLL_S)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(POLL_S)
        self.stop()
        found = load(self.run_dir)
        return found if found is not None and found.finished else None

    def last_line(self) -> str:
        """Return the last line that the process wrote."""
        lines = RunDir(self.run_dir).audit_log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def stop(self) -> None:
        """End the process if it is still there. May be called again."""
        if self._process is not None:
            engine_guard.end_guarded(self._process)
            self._process = None
