"""What stands around the steps of a publication: who may touch its engines meanwhile, and what can't interrupt it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from slime_backend.engine_client import EngineError
from slime_backend.fleet import Fleet, FleetError, Member
from slime_backend.fleet.membership import recognise

T = TypeVar("T")
IDENTIFY_S = 2.5


async def identify(fleet: Fleet, member: Member) -> None:
    """Notice a restart before the transport prepares for processes that are gone. What is wrong else, `look` finds."""
    with suppress(EngineError, FleetError, TimeoutError):
        async with asyncio.timeout(IDENTIFY_S):
            await recognise(fleet, member, await member.client.reports())


@contextmanager
def held(fleet: Fleet, members: Sequence[Member], version: str) -> Iterator[None]:
    """Nobody but this publication retires these engines inside, and they may answer as `version`."""
    fleet.begin(version)
    for member in members:
        member.held = True
    try:
        yield
    finally:
        for member in members:
            member.held = False
        fleet.end()


@contextmanager
def garbage_kept() -> Iterator[None]:
    """No garbage collection inside: all engines would be paused for as long as one takes in a trainer's process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """The result of `work`, and whether this task was cancelled meanwhile, any number of times."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def ignoring_engine_errors(call: Awaitable[None]) -> None:
    with suppress(EngineError):  # best effort on an engine that is already being retired
        await call
