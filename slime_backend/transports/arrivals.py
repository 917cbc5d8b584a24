"""Which of the engines that will load have begun to: a transport that serves all in step starts with all of them.

The loads of one publication need not begin in one turn of the event loop. Whoever stands between the transaction and
the transport may await something first; started without the late ones, a pass over the weights would miss them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

LATE_S = 5.0  # a load that begins so long after the first one is not waited for: the others are paused meanwhile


class Arrivals:
    """For one event loop. `changed` is called when the wait for the missing ones is given up."""

    def __init__(self, names: Iterable[str], changed: Callable[[], None], late_s: float = LATE_S) -> None:
        self.missing = set(names)
        self._changed, self._late_s = changed, late_s
        self._deadline: asyncio.TimerHandle | None = None  # runs from the first arrival on

    def arrive(self, name: str) -> None:
        """`name` loads, or has failed to: either way nobody waits for it any more."""
        self.missing.discard(name)
        if not self.missing:
            self.stop()
        elif self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._late_s, self._give_up)

    def stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        self.missing.clear()
        self._changed()
