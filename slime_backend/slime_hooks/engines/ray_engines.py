"""slime's engine actors, as the publisher sees them. Imports Ray, nothing of slime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

ASK_S = 60.0
ROUTE_S = 120.0
PULL_S = 3600.0


@dataclass(frozen=True, slots=True)
class RayEngine:
    """An actor of slime's SGLangEngine with our methods (engine.py); node 0 of the engine."""

    actor: Any
    key: str
    url: str
    router: str | None

    def route(self) -> None:
        import ray

        ray.get(self.actor.reef_route.remote(), timeout=ROUTE_S)

    def discard(self) -> None:
        import ray

        try:
            ray.get(self.actor.shutdown.remote(), timeout=ASK_S)
        finally:
            ray.kill(self.actor)

    def pull_weights(self, version: int) -> None:
        """Bring the engine's local checkpoint up to `version`. Raises whatever the actor raised."""
        import ray

        ray.get(self.actor.pull_weights.remote(version), timeout=PULL_S)


class RayEngines:
    """Asks each actor for its addresses once."""

    def __init__(self) -> None:
        self._known: dict[str, RayEngine] = {}

    def of(self, actors: Sequence[Any]) -> list[RayEngine]:
        """The engines of `actors`, without those that are dead or None: these are slime's to replace."""
        import ray

        keys = {key_of(actor): actor for actor in actors if actor is not None}
        asked = {key: actor.reef_address.remote() for key, actor in keys.items() if key not in self._known}
        for key, reference in asked.items():
            try:
                url, router = ray.get(reference, timeout=ASK_S)
            except ray.exceptions.RayError as error:
                log.error("one of slime's engines (actor %s) doesn't answer: %s", key, error)
                continue
            self._known[key] = RayEngine(keys[key], key, url, router)
        self._known = {key: engine for key, engine in self._known.items() if key in keys}
        return list(self._known.values())


def key_of(actor: Any) -> str:
    return str(actor._actor_id.hex())
