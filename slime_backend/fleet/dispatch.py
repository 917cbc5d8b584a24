"""Sends a request to a confirmed engine and returns exactly one answer from an engine in good standing.

Sampling has no side effects, so a request whose engine died, aborted it or lost its confirmation on the way is sent
again, complete, to another engine; its first answer is thrown away, never mixed in. `Retries` is the rule for that,
here and in the gateway:

    the request's own fault        HTTP 4xx but 408, 425, 429: raised at once
    refused for now                HTTP 5xx, 408, 425, 429: sent again, later each time, for the fleet's `wait_s`
    no answer, engine alive        the connection broke, or the engine is busy with a load: as refused for now
    no answer, engine gone         retired, unless a publication holds it (liveness.py); sent again
    answer of another version      thrown away, the engine is out of routing until a publication confirms it
    aborted, or malformed          sent again, up to ATTEMPTS times
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_client import EngineError, EngineProtocolError, EngineRefused
from slime_backend.errors import ReefError
from slime_backend.fleet import liveness
from slime_backend.fleet.membership import Fleet, FleetError, Member, offer_return

ATTEMPTS = 8  # that ended in something other than a refusal for now
OFFERS, OFFER_S = 4, 1.0  # to engines that are all retired, to be admitted again, and the seconds between two
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.1, 5.0  # each is a random share, at least half, of what doubles every time


class RequestLost(ReefError, RuntimeError):
    """No engine in good standing answered; the message has the last reason."""


class OtherVersion(ReefError, RuntimeError):
    """An engine answered under a version that it isn't confirmed at."""


@dataclass(frozen=True, slots=True)
class Answer:
    body: dict[str, Any]
    engine: str
    attempts: int


class Sent:
    """What was true of the fleet and of the engine when a request was sent."""

    def __init__(self, fleet: Fleet, member: Member) -> None:
        self.fleet, self.member = fleet, member
        self.gone = member.gone
        self._mark = fleet.mark()

    @property
    def lost(self) -> bool:
        """Whether the engine has lost the confirmation that the request was sent under."""
        return self.gone.is_set()

    def why_lost(self) -> str:
        return f"{self.member.name} was retired while it answered: {self.member.reason}"

    def check_version(self, meta: Mapping[str, Any]) -> None:
        """Raise OtherVersion, and take the engine out of routing, where an answer's `meta_info` names a version that
        wasn't the fleet's, or being published, at any moment since the request was sent."""
        named = {span["version"] for span in meta.get("weight_versions") or ()}
        if not named and meta.get("weight_version") is not None:
            named = {meta["weight_version"]}
        allowed = self.fleet.versions_since(self._mark)
        if named <= allowed:
            return
        others = ", ".join(sorted(map(repr, named - allowed)))
        seen = f"it answers as version {others}; the fleet is at {self.fleet.version!r}"
        if not self.lost:
            self.fleet.demote(self.member, seen)
        raise OtherVersion(f"{self.member.name}: {seen}")


class Retries:
    """Decides after each failed attempt of one request whether it is sent again, and waits until then.

    Raises EngineRefused for a request that is itself wrong, RequestLost once nothing is left to try.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.attempts = 0
        self.reason = ""
        self._hard = 0
        self._refusals = 0  # in a row
        self._waited_s = 0.0  # between these
        self._refused_by: Member | None = None

    def others(self, candidates: list[Member]) -> list[Member]:
        """The engines to choose from: not the one that refused last, where there is another."""
        return [m for m in candidates if m is not self._refused_by] or candidates

    async def failed(self, sent: Sent, why: EngineError | OtherVersion | str) -> None:
        """The request was sent and has no answer that counts."""
        self.reason = str(why)
        if isinstance(why, EngineRefused) and why.own_fault:
            raise why
        if sent.lost and not isinstance(why, OtherVersion):
            self.reason = sent.why_lost()
        member = sent.member
        if sent.lost or isinstance(why, str | EngineProtocolError | OtherVersion):
            self._refusals, self._waited_s = 0, 0.0
            self._hard_failure()
        elif isinstance(why, EngineRefused):
            await self._back_off(member, why.retry_after_s)
        else:  # one broken connection isn't a dead engine
            life = await liveness.check(self.fleet, member, why.seen)
            if life != "busy" and not member.held:
                self._hard_failure()
            if member.status != "retired":
                await self._back_off(member, None)

    def _hard_failure(self) -> None:
        self._hard += 1
        if self._hard >= ATTEMPTS:
            raise self.given_up(self.reason)

    def given_up(self, reason: str) -> RequestLost:
        return RequestLost(f"no answer after {self.attempts} attempts; the last: {reason}")

    async def _back_off(self, member: Member, asked_s: float | None) -> None:
        """Wait for a while that doubles each time, or for what the engine asked; a change in the fleet ends it."""
        left = self.fleet.wait_s - self._waited_s
        if left <= 0:
            raise self.given_up(self.reason)
        pause = min(FIRST_BACKOFF_S * 2 ** min(self._refusals, 16), MOST_BACKOFF_S) * random.uniform(0.5, 1)
        self._refusals += 1
        self._refused_by = member
        started = time.monotonic()
        await self.fleet.wait_changed(min(max(pause, asked_s or 0.0), left))
        if not member.held:  # a publication has deadlines of its own
            self._waited_s += time.monotonic() - started


async def generate(fleet: Fleet, body: Mapping[str, Any], *, on_retry: Callable[[str], None] | None = None) -> Answer:
    """One answer to `body` (SGLang's /generate, not streamed).

    Raises EngineRefused for a request that is itself wrong, RequestLost when nothing is left to try (see above),
    FleetError when no engine is routable for the fleet's `wait_s`.
    """
    retries = Retries(fleet)
    while True:
        await wait_routable(fleet)
        retries.attempts += 1
        with fleet.routed(lambda found: min(retries.others(found), key=lambda m: m.in_flight)) as member:
            sent = Sent(fleet, member)
            try:
                answer = await _unless_lost(sent, body)
                why: EngineError | OtherVersion | str = _why_not(sent, answer)
            except (EngineError, OtherVersion) as error:
                why = error
        if not why and answer is not None:
            return Answer(answer, member.name, retries.attempts)
        await retries.failed(sent, why)
        if on_retry is not None:
            on_retry(retries.reason)


def _why_not(sent: Sent, answer: Mapping[str, Any] | None) -> str:
    """Why an answer can't be returned; "" if it can. Raises OtherVersion."""
    if answer is None or sent.lost:
        return sent.why_lost()
    meta = answer["meta_info"]
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        return f"{sent.member.name} aborted the request"
    sent.check_version(meta)
    return ""


async def _unless_lost(sent: Sent, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The engine's answer, or None as soon as it is retired: a dead or paused engine may never answer."""
    call = asyncio.ensure_future(sent.member.client.generate(body))
    gone = asyncio.ensure_future(sent.gone.wait())
    try:
        await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
        return call.result() if call.done() else None
    finally:
        for task in (call, gone):
            task.cancel()
        await asyncio.gather(call, gone, return_exceptions=True)


async def wait_routable(fleet: Fleet) -> None:
    """Return once some engine is routable. Raises FleetError where none is for `fleet.wait_s`, or where all are retired
    and none of them can be admitted again.
    """
    until = time.monotonic() + fleet.wait_s
    offers = 0
    while not fleet.routable():
        left = until - time.monotonic()
        everybody_retired = bool(fleet.members) and len(fleet.retired()) == len(fleet.members)
        if everybody_retired and offers < OFFERS and not fleet.publishing.locked():
            # A network that was away for a moment takes all engines at once, and nobody else may ask them again.
            offers += 1
            await offer_return(fleet)
            if not fleet.routable():
                await fleet.wait_changed(OFFER_S)
            continue
        if left <= 0 or everybody_retired:
            named = "; ".join(f"{m.name}: {m.reason}" for m in fleet.members.values() if m.reason) or "none has joined"
            raise FleetError(f"no engine left to send requests to ({named})")
        await fleet.wait_changed(min(left, 1.0))
        await asyncio.sleep(0)
