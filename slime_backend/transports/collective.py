"""Weights that one collective operation brings to all engines at once, driven by the trainer's own threads.

The transaction calls `load` for each engine on its event loop; the bytes are moved by code that runs elsewhere, in step
with other ranks. Here the two meet:

    event loop (transaction)                     main thread of rank 0
    expect_loads(a, b)
    load(a), load(b)  open their sessions
                      all are ready         ->   wait_ready(...) returns {a, b}
                                                 ... all ranks send ...
    load(a), load(b)  end, or raise         <-   settle(failed={b: why}): a is sent to again, b fails; settle() ends all

Whoever is sent to is fixed when the sending begins: that waits until every engine that is expected has its session open
or has failed to open one. An engine whose load begins later is given up: it says so itself, and nobody blames the
trainer. The trainer's deadline runs from the moment at which it could begin.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from slime_backend.engine_client import EngineClient
from slime_backend.event_loop import LoopThread
from slime_backend.transports.arrivals import LATE_S, Arrivals
from slime_backend.transports.base import Refused, TransportError
from slime_backend.transports.served import ServedModels, why_no_group

POLL_S = 0.05  # between two looks whether a publication ended without loading anything


@dataclass(slots=True, eq=False)
class _Waiting:
    client: EngineClient
    sent: asyncio.Future[None]


@dataclass(slots=True)
class CollectiveTransport:
    """A Transport for one publication. `loop` is the one that the transaction runs on."""

    loop: LoopThread
    deadline_s: float  # for all rounds of sending together
    name: str = "collective"
    late_s: float = LATE_S  # how long the engines that load wait for one whose load hasn't begun
    _arrivals: Arrivals = field(init=False)
    _opening: int = 0  # loads that have begun, and have no session yet
    _sending: bool = False  # no engine is added any more
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _ready: threading.Event = field(default_factory=threading.Event)
    _may_send: asyncio.Event = field(default_factory=asyncio.Event)  # as _ready, on the loop
    _refused: dict[str, Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expect_loads([])

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        for name, info in (await ServedModels().infos(clients)).items():
            if why := why_no_group(info):
                self._refused[name] = Refused(why)
        self.expect_loads([client for client in clients if client.name not in self._refused])

    def expect_loads(self, clients: Sequence[EngineClient]) -> None:
        """Who is sent to together. Until this is called behind the pause, all that `prepare` knows are expected."""
        self._arrivals = Arrivals([client.name for client in clients], self._note_if_ready, self.late_s)

    def why_not(self, client: EngineClient) -> Refused | None:
        return self._refused.get(client.name)

    async def load(self, client: EngineClient, version: str) -> None:
        """Open the engine's weight session, wait until all have been sent to, close it."""
        self._opening += 1
        self._arrivals.arrive(client.name)
        async with AsyncExitStack() as session:
            try:
                self._refuse_late(client)
                await session.enter_async_context(client.weight_session())
                self._refuse_late(client)
                waiting = _Waiting(client, asyncio.get_running_loop().create_future())
                self._waiting[client.name] = waiting
            finally:
                self._opening -= 1
                self._note_if_ready()
            await self._sent(waiting)

    def _refuse_late(self, client: EngineClient) -> None:
        if self._sending:
            why = f"its load began when the others were already being sent to: they wait for it for {self.late_s:g} s"
            raise TransportError(client.name, why)

    def _note_if_ready(self) -> None:
        if not self._opening and not self._arrivals.missing:
            self._may_send.set()
            self._ready.set()

    async def _sent(self, waiting: _Waiting) -> None:
        name = waiting.client.name
        try:
            # Bounded by `late_s` and by the deadlines of the others' sessions.
            await self._may_send.wait()
            await asyncio.wait_for(waiting.sent, self.deadline_s)
        except TimeoutError:
            raise TransportError(name, f"the trainer didn't finish sending within {self.deadline_s:g} s") from None
        finally:
            self._waiting.pop(name, None)

    async def close(self) -> None:
        return None

    # ---- the side that sends ------------------------------------------------------------------------------------

    def wait_ready(self, over: Callable[[], bool]) -> list[str]:
        """Names of the engines that are paused and have a session open; empty once `over()`, without any.

        Blocks, but never longer than the transaction itself, whose every step has a deadline.
        """
        while not self._ready.wait(POLL_S):
            if over():
                return []
        return self.loop.ask(self._begin_sending)

    def _begin_sending(self) -> list[str]:
        self._sending = True
        return sorted(self._waiting)

    def settle(self, failed: Mapping[str, str], *, done: bool) -> list[str]:
        """After a round of sending: `failed` (engine -> why) are given up; the others have it if `done`.

        Returns the engines that still wait, to be sent to again.
        """
        return self.loop.ask(lambda: self._settle(failed, done))

    def _settle(self, failed: Mapping[str, str], done: bool) -> list[str]:
        """On the loop's thread, where `_waiting` changes: what it returns and what it ends are the same engines."""
        again = []
        for name, waiting in self._waiting.items():
            if waiting.sent.done():  # its deadline came first
                continue
            if name in failed:
                waiting.sent.set_exception(TransportError(name, failed[name]))
            elif done:
                waiting.sent.set_result(None)
            else:
                again.append(name)
        return sorted(again)
