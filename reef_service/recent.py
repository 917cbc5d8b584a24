"""What the gateway answered in the last minute, for its page: rates, latencies, errors. Pure, in memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

WINDOW_S = 60.0
MOST = 100_000  # requests in the window; of more, the latest


class _Answer(NamedTuple):
    at: float
    seconds: float
    tokens: int
    failed: bool


class Recent:
    """Requests that ended within `WINDOW_S`. `now`: a monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()
        self._answers: deque[_Answer] = deque(maxlen=MOST)

    def add(self, seconds: float, tokens: int, *, failed: bool) -> None:
        """A request ended. `tokens`: that were sampled for it."""
        self._forget()
        self._answers.append(_Answer(self._now(), seconds, tokens, failed))

    def to_json(self) -> dict[str, Any]:
        """Rates are a second's, of the time that the gateway has been up where that is less than the window. Latencies
        are of the requests that were answered; None where there were none."""
        self._forget()
        found = self._answers
        over = WINDOW_S
        if len(found) == MOST:  # what fell out at the other end is in no figure
            over = self._now() - found[0].at
        over = max(1.0, min(over, self._now() - self._began))
        seconds = sorted(a.seconds for a in found if not a.failed)
        return {
            "window_s": over,
            "requests": len(found),
            "requests_per_s": len(found) / over,
            "tokens_per_s": sum(a.tokens for a in found) / over,
            "error_rate": sum(a.failed for a in found) / len(found) if found else None,
            **{f"p{q}_ms": 1000 * _quantile(seconds, q) if seconds else None for q in (50, 90, 99)},
        }

    def _forget(self) -> None:
        since = self._now() - WINDOW_S
        while self._answers and self._answers[0].at < since:
            self._answers.popleft()


def _quantile(values: list[float], percent: int) -> float:
    """The smallest value that so many percent of the sorted `values` don't exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]
