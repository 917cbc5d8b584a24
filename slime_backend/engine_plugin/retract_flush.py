"""Lets a flush through after a retract pause.

Needed in SGLang 0.5.15.post1: a retract puts every request in flight back into the waiting queue, and `is_fully_idle`
(managers/scheduler.py:3585) counts that queue, so after it each flush is refused, and an update of weights that bears a
flush ends the scheduler by an assertion (scheduler_components/weight_updater.py:106). From 0.5.23 the test looks past
waiting requests by itself.

The test is relaxed only while the engine is paused in mode `retract`, only if no waiting request holds KV, and never
for a health check, which asks whether the engine has work. Everything else that it looks at is still looked at.
"""

from __future__ import annotations

from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import generation, registry

HOOK = "retract_flush"

_pause_mode: str | None = None  # of this process's scheduler


def install() -> str:
    scheduler = generation.SCHEDULER
    missing = registry.missing_targets([f"{scheduler}.is_fully_idle"])
    if not missing and generation.flushes_while_paused():
        return wire.NOT_NEEDED
    return registry.attach(
        HOOK,
        [
            (f"{scheduler}.pause_generation", "before", _before_pause),
            (f"{scheduler}.continue_generation", "before", _before_continue),
            (f"{scheduler}.is_fully_idle", "around", _around_idle),
        ],
    )


def _before_pause(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    global _pause_mode
    _pause_mode = str(request.mode)


def _before_continue(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _pause_mode
    _pause_mode = None


def _around_idle(original: Any, scheduler: Any, for_health_check: bool = False, *args: Any, **kwargs: Any) -> bool:
    waiting = scheduler.waiting_queue
    if (
        for_health_check
        or not waiting
        or _pause_mode != "retract"
        or not scheduler._engine_paused
        or any(generation.holds_kv(req) for req in waiting)
    ):
        return bool(original(scheduler, for_health_check, *args, **kwargs))
    # The one way to leave the queue out of a test that has no argument for it. Nothing else runs in between: the test
    # reads lengths, on the thread that owns the queue.
    scheduler.waiting_queue = []
    try:
        return bool(original(scheduler, for_health_check, *args, **kwargs))
    finally:
        scheduler.waiting_queue = waiting
