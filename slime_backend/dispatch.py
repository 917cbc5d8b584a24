"""Sends a request to a confirmed engine and returns exactly one answer from an engine in good standing.

Sampling has no side effects, so a request whose engine died, aborted it or lost its confirmation on the way is sent
again, whole, to another engine; its first answer is thrown away, never mixed in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_client import EngineError, EngineProtocolError, EngineRefused
from slime_backend.fleet import Fleet, FleetError, Member

ATTEMPTS = 8
HEALTH_TRIES, HEALTH_S, HEALTH_PAUSE_S = 3, 5.0, 0.2
REFUSED_PAUSE_S = 0.2  # after an HTTP 5xx, which comes back at once
WAIT_FOR_ENGINE_S = 60.0  # a publication or a recovering engine may leave nobody routable for a while


class RequestLost(RuntimeError):
    """No engine in good standing answered; the message has the last reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    body: dict[str, Any]
    engine: str
    attempts: int


async def generate(fleet: Fleet, body: Mapping[str, Any], *, on_retry: Callable[[str], None] | None = None) -> Answer:
    """One answer to `body` (SGLang's /generate, not streamed).

    Raises EngineRefused for a request that is itself wrong (HTTP 4xx), RequestLost after `ATTEMPTS` tries, FleetError
    when no engine is routable for `WAIT_FOR_ENGINE_S`.
    """
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        await wait_routable(fleet)
        with fleet.routed() as member:
            try:
                answer = await _unless_retired(member, body)
            except EngineRefused as error:
                if "HTTP 4" in error.seen:
                    raise
                reason = str(error)
                await asyncio.sleep(REFUSED_PAUSE_S)
            except EngineProtocolError as error:
                reason = str(error)
            except EngineError as error:
                reason = str(error)
                # One broken connection isn't a dead engine; an engine that answers nothing is.
                if member.status != "retired" and not await still_alive(member):
                    fleet.retire(member, f"a request failed and it no longer answers: {error.seen}")
            else:
                if answer is None or member.status == "retired":
                    reason = f"{member.name} was retired while it answered: {member.reason}"
                elif (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort":
                    reason = f"{member.name} aborted the request"
                else:
                    return Answer(answer, member.name, attempt)
        if on_retry is not None:
            on_retry(reason)
    raise RequestLost(f"no answer after {ATTEMPTS} attempts; the last: {reason}")


async def _unless_retired(member: Member, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The engine's answer, or None as soon as it is retired: a dead or paused engine may never answer."""
    call = asyncio.ensure_future(member.client.generate(body))
    gone = asyncio.ensure_future(member.gone.wait())
    try:
        await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
        return call.result() if call.done() else None
    finally:
        for task in (call, gone):
            task.cancel()
        await asyncio.gather(call, gone, return_exceptions=True)


async def still_alive(member: Member) -> bool:
    """Whether the engine answers /health, asked a few times."""
    for _ in range(HEALTH_TRIES):
        if await member.client.healthy(HEALTH_S):
            return True
        await asyncio.sleep(HEALTH_PAUSE_S)
    return False


async def wait_routable(fleet: Fleet) -> None:
    """Return once some engine is routable. Raises FleetError where none will be, or none is for WAIT_FOR_ENGINE_S."""
    until = time.monotonic() + WAIT_FOR_ENGINE_S
    while not fleet.routable():
        left = until - time.monotonic()
        everybody_retired = bool(fleet.members) and len(fleet.retired()) == len(fleet.members)
        if left <= 0 or everybody_retired:
            named = "; ".join(f"{name}: {why}" for name, why in fleet.retired().items()) or "none has joined"
            raise FleetError(f"no engine left to send requests to ({named})")
        await fleet.wait_changed(min(left, 1.0))
        await asyncio.sleep(0)
