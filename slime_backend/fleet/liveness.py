"""The one definition of a living engine, for everybody who might give one up.

    alive   its schedulers report: whatever they say, also that they are paused
    busy    its HTTP process answers and its schedulers don't: a load holds them, or one long step
    gone    nothing answers, its process has ended, or it has been busy for longer than a load may take; `ended` where
            its connections are refused or break: its process is no more. Silence alone may be the network's
    unseen  this process could not ask (no descriptor, no memory): nothing is known, and nothing is done

SGLang's own /health isn't asked: it has a token generated, which no paused and no loading engine does (0.5.23,
srt/entrypoints/http_server.py:723), so it fails after 20 s on an engine that lacks nothing. Reports come from the
schedulers' own threads, between two steps; /model_info is answered by the HTTP process alone, which SGLang's watchdog
ends within a second or two of a scheduler's death (srt/utils/watchdog.py:166).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slime_backend.engine_client import (
    EngineClient,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineUncalled,
    EngineUnreachable,
)
from slime_backend.fleet.membership import Fleet, FleetError, Member, recognise
from slime_backend.wire import SchedulerReport

Life = Literal["alive", "busy", "gone", "unseen"]
LOOKS, LOOK_S, PAUSE_S = 3, 2.5, 0.2  # an engine is gone once it has missed so many looks, each of so many seconds


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at an engine showed."""

    life: Life
    reports: tuple[SchedulerReport, ...] = ()  # empty unless it is alive and has our plugin
    seen: str = ""  # why there are none
    ended: bool = False  # its process has: what was in flight on it may have ended it


async def look(client: EngineClient, *, looks: int = LOOKS, process_alive: Callable[[], bool] | None = None) -> Look:
    """Ask the engine until it answers, at most `looks` times.

    `process_alive`: for an engine that we started; one whose process has ended isn't asked.
    """
    deadline = min(LOOK_S, client.deadlines.control)
    found = Look("gone", seen="never asked")
    for attempt in range(looks):
        if attempt:
            await asyncio.sleep(PAUSE_S)
        if process_alive is not None and not process_alive():
            return Look("gone", seen="its process has ended", ended=True)
        try:
            return Look("alive", tuple(await client.reports(deadline=deadline)))
        except EngineProtocolError as error:
            return Look("alive", seen=str(error))
        except EngineUncalled as error:
            return Look("unseen", seen=str(error))
        except EngineError as error:
            try:
                await _ask_server(client, deadline)
            except EngineUncalled as uncalled:
                return Look("unseen", seen=str(uncalled))
            except EngineError as silent:
                found = Look("gone", seen=str(error), ended=isinstance(silent, EngineUnreachable))
            else:
                return _busy(client, str(error))
    return found


def _busy(client: EngineClient, seen: str) -> Look:
    now = time.monotonic()
    if client.silent_since is None:
        client.silent_since = now
    for_s = now - client.silent_since
    if for_s > client.deadlines.load:
        return Look("gone", seen=f"its schedulers haven't answered for {for_s:.0f} s, longer than a load may take")
    return Look("busy", seen=seen)


async def _ask_server(client: EngineClient, deadline: float) -> None:
    """Raises EngineError where the HTTP process doesn't answer."""
    try:
        await client.call("GET", "/model_info", deadline=deadline, repeatable=True)
    except EngineRefused as error:
        if error.for_now:  # 404 is an older SGLang, which has another name for it; 502 of a proxy is no answer
            raise


async def check(fleet: Fleet, member: Member, seen: str) -> Life:
    """Look at a member that something was wrong with (`seen`), and take it out of routing where it is gone, or where
    it isn't the engine that was confirmed.

    A member that a publication holds is left to that publication, which notices both by itself.
    """
    known = member.gone
    found = await look(member.client)
    if member.held or member.status == "retired" or member.gone is not known or known.is_set():
        return found.life  # somebody else has decided meanwhile
    if found.life == "gone":
        fleet.retire(member, f"it no longer answers: {seen}", ended=found.ended)
    elif found.life == "alive":
        await compare(fleet, member, found)
    return found.life


async def compare(fleet: Fleet, member: Member, found: Look) -> None:
    """Take a living member out of routing that isn't the engine which was confirmed."""
    try:
        if not found.reports:
            raise FleetError(found.seen)
        await recognise(fleet, member, found.reports)
    except (FleetError, EngineError) as error:
        fleet.retire(member, f"what answers at its address can't be admitted: {error}")
