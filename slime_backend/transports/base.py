"""The two calls that the publication transaction makes of a transport."""

from __future__ import annotations

from collections.abc import Sequence
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


class Transport(Protocol):
    """May have `why_not(client) -> Refused | None` as well: asked behind `prepare`, it names the engines that `load`
    couldn't serve, and these aren't paused. And `counted = False`, where its bytes reach an engine without any of
    SGLang's update calls (RDMA), or where it moves none: then no count of loads is demanded."""

    name: str

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Everything that can be done while the engines still generate. An error here leaves them untouched."""

    async def load(self, client: EngineClient, version: str) -> None:
        """Load `version` into one paused engine and return once it has it. Called for all engines at once.

        Raises EngineError or TransportError within the client's load deadline; never hangs.
        """

    async def close(self) -> None: ...
