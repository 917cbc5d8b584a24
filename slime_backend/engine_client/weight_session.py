"""The session that SGLang 0.5.23 demands around distributed and tensor updates of weights."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from slime_backend.engine_client.calls import EngineCalls, is_absent
from slime_backend.engine_client.errors import EngineError, EngineRefused

log = logging.getLogger(__name__)
END_SESSION = "/end_weight_update"


@asynccontextmanager
async def weight_session(client: EngineCalls) -> AsyncIterator[None]:
    """Hold a session during the block; nothing on an engine that has no such endpoint (0.5.15.post1), where none is
    needed.

    Begin and end have a load's deadline, since the engine may have to process the weights. After an error in the
    block the engine is given up: its end may hang then, what it answers changes nothing, and the error goes on.
    """
    if not await _begin(client):
        yield
        return
    try:
        yield
    except BaseException:
        await _give_up(client)
        raise
    await client.call("POST", END_SESSION, body={}, deadline=client.deadlines.load)


async def _begin(client: EngineCalls) -> bool:
    """Whether a session is open now; False where this SGLang has none.

    A session outlives the publisher that opened it and refuses every later one (0.5.23,
    scheduler_components/weight_updater.py:311): one that is found open is ended, and so is one of which it isn't
    known whether it was opened.
    """
    try:
        await _begin_once(client)
    except EngineRefused as error:
        if is_absent(error):
            return False
        if "already open" not in error.seen:
            raise
        log.warning("%s: a weight session of an earlier publisher is open; it is ended", client.name)
        await client.call("POST", END_SESSION, body={}, deadline=client.deadlines.load)
        await _begin_once(client)
    return True


async def _begin_once(client: EngineCalls) -> None:
    try:
        await client.call("POST", "/begin_weight_update", body={"selector": "all"}, deadline=client.deadlines.load)
    except EngineRefused:
        raise
    except BaseException:  # its outcome is unknown, also after a cancellation
        await _give_up(client)
        raise


async def _give_up(client: EngineCalls) -> None:
    with suppress(EngineError):
        await client.call("POST", END_SESSION, body={}, deadline=client.deadlines.control)
