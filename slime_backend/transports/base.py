"""The two calls that the publication transaction makes of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slime_backend.engine_client import EngineClient


class TransportError(RuntimeError):
    """The bytes didn't reach an engine."""

    def __init__(self, engine: str, seen: str) -> None:
        super().__init__(f"{engine}: {seen}")
        self.engine, self.seen = engine, seen


class Transport(Protocol):
    name: str

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Everything that can be done while the engines still generate. An error here leaves them untouched."""

    async def load(self, client: EngineClient, version: str) -> None:
        """Load `version` into one paused engine and return once it has it. Called for all engines at once.

        Raises EngineError or TransportError within the client's load deadline; never hangs.
        """

    async def close(self) -> None: ...
