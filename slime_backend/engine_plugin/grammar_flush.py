"""Lets a flush through while requests wait for their grammars.

A request with a schema or a regex waits in the grammar queue until its grammar is compiled. It holds no KV there, so a
flush takes nothing from it, but SGLang's idle test counts that queue (0.5.23, managers/scheduler.py:5372), and a paused
scheduler never empties it (:2034): every flush is refused until the resume, however soon the grammar was ready. The
same holds in every release from 0.5.15.post1 on.

The queue is left out of the test only while the engine is paused in mode `retract`, only if no request in it holds KV,
and never for a health check. Such a flush keeps the compiled grammars as well (constrained/grammar_manager.py,
`clear`): they don't depend on weights, the requests in the queue are about to use them, and others are being compiled
by threads into the cache that would be emptied.
"""

from __future__ import annotations

from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import generation, guard, registry
from slime_backend.engine_plugin.generation import SCHEDULER
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "grammar_flush"
MANAGER = "sglang.srt.constrained.grammar_manager.GrammarManager"
IDLE = f"{SCHEDULER}.is_fully_idle"
USES: tuple[Need, ...] = (
    f"{SCHEDULER}.grammar_manager",
    f"{SCHEDULER}._engine_paused",
    f"{MANAGER}.grammar_queue",
    f"{MANAGER}.scheduler",
    "sglang.srt.managers.io_struct.PauseGenerationReqInput.mode",
    *generation.KV_USES,
)

_pause_mode: str | None = None  # of this process's scheduler


def install() -> str:
    return registry.install(HOOK, plan(IMPORTED))


def plan(sglang: Sglang) -> Plan:
    if sglang.has(IDLE) and not sglang.mentions(IDLE, "grammar"):
        return Plan(instead=wire.NOT_NEEDED)  # the idle test doesn't look at the queue
    functions: list[registry.HookFunction] = [
        (f"{SCHEDULER}.pause_generation", "before", _before_pause),
        (f"{SCHEDULER}.continue_generation", "before", _before_continue),
        (IDLE, "around", _around_idle),
    ]
    if sglang.has(f"{MANAGER}.clear"):
        functions.append((f"{MANAGER}.clear", "around", _around_clear))
    return Plan(tuple(functions), USES)


def _before_pause(scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    global _pause_mode
    _pause_mode = str(getattr(recv_req, "mode", None))


def _before_continue(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _pause_mode
    _pause_mode = None


def _waiting(manager: Any) -> list[Any]:
    """The requests that wait for a grammar of an engine that is paused in mode retract, if none holds KV."""
    queue = getattr(manager, "grammar_queue", None)
    scheduler = getattr(manager, "scheduler", None)
    if not queue or _pause_mode != "retract" or not getattr(scheduler, "_engine_paused", False):
        return []
    # A request of another form can't be looked at: SGLang's own test decides.
    return guard.attempt(_without_kv, queue, report=_report, otherwise=[])


def _without_kv(queue: list[Any]) -> list[Any]:
    return [] if any(generation.holds_kv(req) for req in queue) else list(queue)


def _report(error: Exception) -> None:
    registry.report_fault((HOOK,), MANAGER, error)


def _around_idle(original: Any, scheduler: Any, for_health_check: bool = False, *args: Any, **kwargs: Any) -> bool:
    manager = getattr(scheduler, "grammar_manager", None)
    if for_health_check or not _waiting(manager):
        return bool(original(scheduler, for_health_check, *args, **kwargs))
    # The one way to leave the queue out of a test that has no argument for it. Nothing else runs in between: the test
    # reads lengths, on the thread that owns the queue.
    assert manager is not None
    queue, manager.grammar_queue = manager.grammar_queue, []
    try:
        return bool(original(scheduler, for_health_check, *args, **kwargs))
    finally:
        manager.grammar_queue = queue


def _around_clear(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    return None if _waiting(manager) else original(manager, *args, **kwargs)
