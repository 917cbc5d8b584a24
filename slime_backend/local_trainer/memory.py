"""`PeakMemory` measures the peak memory of this process and its children."""

from __future__ import annotations

import contextlib
import threading

import psutil

INTERVAL_S = 1.0


class PeakMemory:
    """A thread samples the resident memory of the process tree; `peak_gib` is the largest sum seen.

    Pages that processes share are counted in each of them, so the figure is an upper bound.
    """

    def __init__(self) -> None:
        self.peak_gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        me = psutil.Process()
        while True:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it may have ended since it was listed
                    total += process.memory_info().rss
            self.peak_gib = max(self.peak_gib, total / 2**30)
            if self._stop.wait(INTERVAL_S):
                return
