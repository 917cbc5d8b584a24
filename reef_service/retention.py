"""Removes what `keep_trained_s` and `keep_gib` let go, next to everything else that the gateway does."""

from __future__ import annotations

import asyncio
import logging
import time

from reef_service.data_plane.sessions import Sessions
from reef_service.store import Store, StoreError
from reef_service.store.retention import Limit

log = logging.getLogger(__name__)
QUIET_S = 600.0  # since the last turn of a session: somebody may be about to go on with it
MOST_WAIT_S = 60.0  # between two looks


class Retention:
    def __init__(self, store: Store, sessions: Sessions, keep_trained_s: float | None, keep_gib: float | None) -> None:
        self.store, self.sessions = store, sessions
        self.keep_s = keep_trained_s
        self.most = None if keep_gib is None else int(keep_gib * 2**30)

    @property
    def limited(self) -> bool:
        return self.keep_s is not None or self.most is not None

    async def run(self) -> None:
        """Until it is cancelled; returns at once where everything is kept."""
        while self.limited:
            try:
                removed = await self.look()
                if removed:
                    log.info("%d sessions were removed from the store: they were trained on", removed)
            except StoreError as error:  # tried again at the next look
                log.warning("nothing is removed from the store: %s", error)
            await asyncio.sleep(MOST_WAIT_S if self.keep_s is None else min(MOST_WAIT_S, max(1.0, self.keep_s / 4)))

    async def look(self) -> int:
        """Remove what is to go now, a few sessions at a time; how many."""
        removed = 0
        now = time.time()
        quiet_s = QUIET_S if self.keep_s is None else min(QUIET_S, self.keep_s)
        limit = Limit(None if self.keep_s is None else now - self.keep_s, self.most, now - quiet_s)
        while names := await self.store.remove_some(limit):
            self.sessions.forget(names)
            removed += len(names)
        return removed
