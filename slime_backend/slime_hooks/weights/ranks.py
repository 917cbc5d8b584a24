"""The trainer's ranks during one publication: rank 0 runs the transaction, all of them send.

`publish_together` is called by every rank at once, as slime's own update is. Whatever happens on rank 0's side, the
other ranks hear of it and raise the same error: nobody is left waiting in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from slime_backend.publication import PublicationReport
from slime_backend.slime_hooks.weights.errors import PublicationFailed, rebuilt, shareable
from slime_backend.transports.collective import CollectiveTransport

log = logging.getLogger(__name__)

MAX_ROUNDS = 3  # of sending, each without the engines that failed in the one before

# Sends everything to the engines of these names; returns those that failed, with the reason. Must not raise for a
# failing engine: the other ranks are in the middle of the same collectives.
Send = Callable[[Sequence[str]], dict[str, str]]
Figures = dict[str, float]


class Ranks(Protocol):
    """The trainer's processes."""

    @property
    def rank(self) -> int: ...

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank."""


class Leader(Protocol):
    """What rank 0 does alone (publisher.py)."""

    def start(self) -> tuple[Future[PublicationReport], CollectiveTransport | None]:
        """Begin the transaction; without a transport nothing is left to be sent by the ranks."""

    def finish(self, future: Future[PublicationReport]) -> Figures:
        """Wait for its end, route and record; raises PublicationFailed."""


def publish_together(ranks: Ranks, leader: Leader | None, send: Send | None = None) -> Figures:
    """Publish; returns the figures of the publication. `leader` on rank 0 only.

    Raises PublicationFailed, on every rank, where no engine reached the new version.
    """
    if ranks.rank == 0:
        assert leader is not None
        outcome = _lead(ranks, leader, send)
    else:
        while names := ranks.share(None):
            assert send is not None
            ranks.gather(send(names))
        outcome = ranks.share(None)
    if isinstance(outcome, dict):
        return outcome
    raise rebuilt(outcome)


def _lead(ranks: Ranks, leader: Leader, send: Send | None) -> Figures | tuple[str, str]:
    """Rank 0's part. Returns what it shared: the figures, or an error in a form that `rebuilt` takes."""
    outcome: Figures | tuple[str, str]
    try:
        future, transport = leader.start()
        if transport is not None:
            assert send is not None
            _send_rounds(ranks, transport, future, send)
        outcome = leader.finish(future)
    except PublicationFailed as error:
        outcome = shareable(error)
    ranks.share([])  # no more rounds
    ranks.share(outcome)
    return outcome


def _send_rounds(ranks: Ranks, transport: CollectiveTransport, future: Future[PublicationReport], send: Send) -> None:
    names = transport.wait_ready(future.done)
    for attempt in range(1, MAX_ROUNDS + 1):
        if not names:
            return
        try:
            ranks.share(names)
            failed = {name: why for part in ranks.gather(send(names)) for name, why in part.items()}
        except BaseException as error:  # of the trainer itself: it ends, and leaves no engine paused
            transport.settle(dict.fromkeys(names, f"the trainer failed: {type(error).__name__}: {error}"), done=True)
            with suppress(Exception):
                future.result()
            raise
        if not failed:
            transport.settle({}, done=True)
            return
        for name, why in failed.items():
            log.error("the weights didn't reach %s: %s", name, why)
        if attempt == MAX_ROUNDS:
            failed = {name: failed.get(name, f"not reached in {MAX_ROUNDS} rounds of sending") for name in names}
        names = transport.settle(failed, done=False)
