"""What the publication transaction asks of a transport, and what a transport may rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_backend.engine_client import EngineClient
from slime_backend.errors import EngineFault


class TransportError(EngineFault, RuntimeError):
    """The bytes didn't reach an engine."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a transport can't bring weights to one engine. `unknown`: the engine may be stuck in what was asked of it."""

    why: str
    unknown: bool = False


def refused_by(transport: Any, client: EngineClient) -> Refused | None:
    """What `transport.why_not(client)` answers behind `prepare`; None where it has no such method."""
    ask = getattr(transport, "why_not", None)
    return ask(client) if ask is not None else None


def is_counted(transport: Any) -> bool:
    """Whether an engine counts each of the transport's loads as an update; so unless it says `counted = False`."""
    return bool(getattr(transport, "counted", True))


def expect_loads(transport: Any, clients: Sequence[EngineClient]) -> None:
    """Call `transport.expect_loads(clients)`, where it has such a method."""
    expect = getattr(transport, "expect_loads", None)
    if expect is not None:
        expect(clients)


def expect_digests(transport: Any, ahead_bytes: float, paused_bytes: float) -> None:
    """Call `transport.expect_digests(...)`, where it has such a method."""
    expect = getattr(transport, "expect_digests", None)
    if expect is not None:
        expect(ahead_bytes, paused_bytes)


async def digests_of(transport: Any) -> Mapping[str, Sequence[str]] | None:
    """What `transport.digests()` answers; None where it has no such method."""
    digests = getattr(transport, "digests", None)
    return await digests() if digests is not None else None


class Transport(Protocol):
    """How the bytes of a version reach the engines.

    The loads of one publication belong together, and no transport may rely on when each begins: whoever stands between
    the transaction and the transport may await something first, and an engine may take its time to answer. A transport
    that brings the weights to all engines in step waits for those that `expect_loads` named (arrivals.py).

    May have, and one that wraps another transport passes on:

        expect_loads(clients)        called once, behind the pause and before the first load, with exactly the engines
                                     that `load` will be called for
        why_not(client)              Refused, or None: asked behind `prepare`, it names the engines that `load` couldn't
                                     serve, and these aren't paused
        expect_digests(ahead, paused)  before `prepare`: how many bytes may be digested while the engines generate, and
                                     while they are paused; a source that is larger isn't
        async digests()              asked for behind the loads: name -> digests of each tensor that was sent
                                     (weight_sources/digests.py), or None where there are none
        counted = False              its bytes reach an engine without any of SGLang's update calls (RDMA), or it moves
                                     none: then no count of loads is demanded
    """

    name: str

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Everything that can be done while the engines still generate. An error here leaves them untouched."""

    async def load(self, client: EngineClient, version: str) -> None:
        """Load `version` into one paused engine and return once it has it. Called for all engines at once.

        Raises EngineError or TransportError within the client's load deadline; never hangs.
        """

    async def close(self) -> None: ...
