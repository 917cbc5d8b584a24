"""Lets a paused scheduler sleep until the next message, as an idle one does.

An engine that is started with --sleep-on-idle waits at its sockets while it has nothing to do. A paused one doesn't get
there: the loop goes back to the sockets before that place (0.5.23, managers/scheduler.py, `event_loop_normal` and
`event_loop_overlap`; 0.5.15.post1 alike), so it asks them over and over, on a core that the trainer, the transport or
the next engine's pause needs. Engines that share a machine's cores wait for each other then.

Without --sleep-on-idle, where each engine has a core to itself, the hook does nothing.
"""

from __future__ import annotations

from typing import Any

from slime_backend.engine_plugin import generation, registry

HOOK = "paused_sleep"


def install() -> str:
    scheduler = generation.SCHEDULER
    if missing := registry.missing_targets([f"{scheduler}.maybe_sleep_on_idle"]):
        return f"this SGLang has no {', '.join(missing)}"
    return registry.attach(HOOK, [(f"{scheduler}.process_input_requests", "after", _after_messages)])


def _after_messages(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Wait for a message, a second at most (idle_sleeper.py), unless one was put back to be looked at next (0.5.23)."""
    if scheduler._engine_paused and not getattr(scheduler, "_deferred_input_requests", None):
        scheduler.maybe_sleep_on_idle()
