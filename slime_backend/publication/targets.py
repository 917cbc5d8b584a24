"""One step on many engines at once: who confirmed it, how long it took, and why it failed on the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slime_backend.engine_client import EngineClient
from slime_backend.errors import EngineFault
from slime_backend.fleet import FleetError
from slime_backend.publication.report import EngineOutcome, Step
from slime_backend.wire import SchedulerReport


@dataclass(slots=True, eq=False)
class Target:
    """One engine whose weights are to change: what it showed so far, and its outcome."""

    client: EngineClient
    outcome: EngineOutcome
    before: list[SchedulerReport] = field(default_factory=list)  # while it still generated
    at_pause: list[SchedulerReport] = field(default_factory=list)  # those that proved the pause, or the flush in it
    weights_wrong: list[str] = field(default_factory=list)  # what its digests show to be other than what was sent

    @property
    def name(self) -> str:
        return self.client.name

    def fail(self, step: Step, reason: str) -> None:
        self.outcome.fail(step, reason)


AnyTarget = TypeVar("AnyTarget", bound=Target)


async def on_all(
    targets: Sequence[AnyTarget], step: Step, action: Callable[[AnyTarget], Awaitable[None]]
) -> list[AnyTarget]:
    """Run one step on every engine at once. Returns those that confirmed it; the others have the reason."""

    async def one(target: AnyTarget) -> bool:
        started = time.perf_counter()
        try:
            await action(target)
        except (EngineFault, FleetError) as error:
            target.fail(step, getattr(error, "seen", str(error)))
            return False
        finally:
            target.outcome.times[step] = ms_since(started)
        return True

    # All are awaited before an unexpected error goes on: nothing may still be under way when the engines are resumed.
    kept = await asyncio.gather(*(one(t) for t in targets), return_exceptions=True)
    for result in kept:
        if isinstance(result, BaseException):
            raise result
    return [t for t, ok in zip(targets, kept, strict=True) if ok]


def ms_since(started: float) -> float:
    """`started`: of time.perf_counter()."""
    return round((time.perf_counter() - started) * 1000, 3)
