"""Lets a flush through after a retract pause.

Needed in SGLang 0.5.15.post1 to 0.5.20: a retract puts every request in flight back into the waiting queue, and
`is_fully_idle` (0.5.15.post1, managers/scheduler.py:3585) counts that queue, so after it each flush is refused, and an
update of weights that bears a flush ends the scheduler by an assertion (scheduler_components/weight_updater.py:106).
From 0.5.21 the test looks past waiting requests by itself.

The test is relaxed only while the engine is paused in mode `retract`, only if no waiting request holds KV, and never
for a health check, which asks whether the engine has work. Everything else that it looks at is still looked at.
"""

from __future__ import annotations

from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import generation, registry
from slime_backend.engine_plugin.generation import SCHEDULER
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "retract_flush"
USES: tuple[Need, ...] = (
    f"{SCHEDULER}.waiting_queue",
    f"{SCHEDULER}._engine_paused",
    "sglang.srt.managers.io_struct.PauseGenerationReqInput.mode",
    *generation.KV_USES,
)

_pause_mode: str | None = None  # of this process's scheduler


def install() -> str:
    return registry.install(HOOK, plan(IMPORTED))


def plan(sglang: Sglang) -> Plan:
    if generation.flushes_while_paused(sglang):
        return Plan(instead=wire.NOT_NEEDED)
    return Plan(
        (
            (f"{SCHEDULER}.pause_generation", "before", _before_pause),
            (f"{SCHEDULER}.continue_generation", "before", _before_continue),
            (f"{SCHEDULER}.is_fully_idle", "around", _around_idle),
        ),
        USES,
    )


def _before_pause(scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    global _pause_mode
    _pause_mode = str(recv_req.mode)


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
