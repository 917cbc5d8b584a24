"""Lets a paused scheduler sleep until the next message, as an idle one does.

An engine that is started with --sleep-on-idle waits at its sockets while it has nothing to do. A paused one doesn't get
there: the loop goes back to the sockets before that place (0.5.23, managers/scheduler.py, `event_loop_normal` and
`event_loop_overlap`; the releases from 0.5.15.post1 alike), so it asks them over and over, on a core that the trainer,
the transport or the next engine's pause needs. Engines that share a machine's cores wait for each other then.

Without --sleep-on-idle, where each engine has a core to itself, the hook does nothing.
"""

from __future__ import annotations

from typing import Any

from slime_backend.engine_plugin import registry
from slime_backend.engine_plugin.generation import SCHEDULER
from slime_backend.engine_plugin.names import IMPORTED, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "paused_sleep"
USES = (f"{SCHEDULER}.maybe_sleep_on_idle", f"{SCHEDULER}._engine_paused")


def install() -> str:
    return registry.install(HOOK, plan(IMPORTED))


def plan(sglang: Sglang) -> Plan:
    return Plan(((f"{SCHEDULER}.process_input_requests", "after", _after_messages),), USES)


def _after_messages(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Wait for a message, a second at most (idle_sleeper.py), unless one was put back for the next step (0.5.22)."""
    if scheduler._engine_paused and not getattr(scheduler, "_deferred_input_requests", None):
        scheduler.maybe_sleep_on_idle()
