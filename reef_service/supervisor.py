"""Engines of `reef-slime up` that end by themselves: logged with their last lines, and started again, so often and no
more. One that is back is admitted as every retired engine is (watch.py): checked against the policy, and routed to once
it serves the fleet's version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_backend.engine_process import EngineStartError, LocalEngine
from slime_backend.fleet import Fleet

log = logging.getLogger(__name__)
LOOK_S = 0.5
RESTARTS, WITHIN_S = 3, 3600.0  # of one engine
LINES, MOST_READ = 12, 16_384  # the end of a log that is repeated: lines, bytes


class Supervisor:
    """One for the engines of a fleet, which have its members' names."""

    def __init__(
        self, fleet: Fleet, engines: Sequence[LocalEngine], ready_s: float, *, restarts: int = RESTARTS
    ) -> None:
        self.fleet, self.engines, self.ready_s, self.restarts = fleet, engines, ready_s, restarts
        self.ends: defaultdict[str, int] = defaultdict(int)  # by engine's name
        self._started: defaultdict[str, deque[float]] = defaultdict(deque)  # when each was started again
        self._given_up: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(self._keep(engine) for engine in self.engines))

    async def _keep(self, engine: LocalEngine) -> None:
        while engine.name not in self._given_up:
            await asyncio.sleep(LOOK_S)
            if not engine.alive():
                self._note_end(engine)
                await self._start_again(engine)

    def _note_end(self, engine: LocalEngine) -> None:
        self.ends[engine.name] += 1
        lines = "\n".join(f"    {line}" for line in last_lines(engine.log_path))
        log.error("%s has ended; the last lines of %s:\n%s", engine.name, engine.log_path, lines)
        member = self.fleet.members.get(engine.name)
        if member is not None and not member.held:  # a publication notices by itself
            self.fleet.retire(member, f"its process has ended: {engine.last_words()}", ended=True)

    async def _start_again(self, engine: LocalEngine) -> None:
        started, now = self._started[engine.name], time.monotonic()
        while started and now - started[0] > WITHIN_S:
            started.popleft()
        if len(started) >= self.restarts:
            self._given_up.add(engine.name)
            log.error(
                "%s has ended %d times within %g s and is not started again; see %s",
                engine.name, len(started) + 1, WITHIN_S, engine.log_path,
            )  # fmt: skip
            return
        started.append(now)
        _keep_log(engine.log_path, self.ends[engine.name])
        engine.settings = replace(engine.settings, port=engine.port)  # its address is its name in the fleet
        try:
            await asyncio.to_thread(engine.stop)
            await asyncio.to_thread(engine.start)
            log.warning("%s is started again (%d of %d)", engine.name, len(started), self.restarts)
            await asyncio.to_thread(engine.wait_ready, self.ready_s)
        except EngineStartError as error:
            log.error("%s did not start again: %s", engine.name, error)
            await asyncio.to_thread(engine.stop)  # it counts as ended


def last_lines(path: Path, count: int = LINES) -> list[str]:
    """The last lines of a log that aren't blank, however long it is."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_READ))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return [f"(no log: {error})"]
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-count:]


def _keep_log(path: Path, number: int) -> None:
    """A start writes its log from the beginning; what the engine before it wrote shows why that ended."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}.{number}"))
