"""Sends a request to a confirmed engine and returns exactly one answer from an engine in good standing.

Sampling has no side effects, so a request whose engine fell silent, aborted it or lost its confirmation on the way is
sent again, complete, to another engine; its first answer is thrown away, never mixed in. `Retries` is the rule for
that, here and in the gateway:

    the request's own fault        HTTP 4xx but 408, 425, 429: raised at once
    refused for now                HTTP 5xx, 408, 425, 429: sent again, later each time, for the fleet's `wait_s`
    no answer, engine alive        the connection broke, or the engine is busy with a load: as refused for now
    no answer, engine gone         retired, unless a publication holds it (liveness.py); sent again where the engine is
                                   only silent, given up where its process ended during the request (quarantine.py):
                                   whatever ended it is in no second engine
    not sent, own fault            no descriptor or memory here: as refused for now, for LOCAL_S
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

from slime_backend.engine_client import (
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUncalled,
    EngineUnreachable,
)
from slime_backend.errors import ReefError
from slime_backend.fleet import liveness
from slime_backend.fleet.membership import Fleet, FleetError, Member, offer_return
from slime_backend.fleet.quarantine import End, key_of

ATTEMPTS = 8  # that ended in something other than a refusal for now
OFFERS, OFFER_S = 4, 1.0  # to engines that are all retired, to be admitted again, and the seconds between two
DYING_S = 5.0  # for an engine without schedulers to end: SGLang's watchdog takes a second or two
FAILED = frozenset({500, 502, 504})  # what a dying engine, or a proxy before it, answers
# SGLang answers 500 for it, but the request alone is why: its grammar left nothing to sample.
NO_TOKEN_LEFT = "Grammar accept_token failed"
LOCAL_S = 5.0  # for this process to have a descriptor again
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.1, 5.0  # each is a random share, at least half, of what doubles every time


class RequestLost(ReefError, RuntimeError):
    """No engine in good standing answered; the message has the last reason."""


class RequestQuarantined(RequestLost):
    """An engine ended during this request, so no other engine gets it. `again`: it had been given up before."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


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
        self.gone, self.instances = member.gone, member.instances
        self._mark = fleet.mark()

    @property
    def lost(self) -> bool:
        """Whether the engine has lost the confirmation that the request was sent under."""
        return self.gone.is_set()

    @property
    def end(self) -> End | None:
        """The end of the engine's process, where the confirmation was lost by it."""
        return self.gone.end if self.gone.is_set() else None

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

    Raises EngineRefused for a request that is itself wrong, EngineUncalled where this process can't call any engine,
    RequestLost once nothing is left to try, RequestQuarantined once an engine has ended.
    """

    def __init__(self, fleet: Fleet, key: Callable[[], str]) -> None:
        """`key`: what the quarantine knows the request by; RequestQuarantined where it doesn't let it in again."""
        self.fleet, self._key = fleet, key
        if fleet.quarantine and (why := fleet.quarantine.why_refused(key())):
            raise RequestQuarantined(f"it is not sent to any engine: {why}", again=True)
        self.attempts = 0
        self.reason = ""
        self._hard = 0
        self._refusals = 0  # in a row
        self._waited_s = 0.0  # between these
        self._refused_by: Member | None = None
        self._ended: tuple[Sent, End] | None = None  # the engine that seems to have ended during it

    def others(self, candidates: list[Member]) -> list[Member]:
        """The engines to choose from: not the one that refused last, where there is another."""
        return [m for m in candidates if m is not self._refused_by] or candidates

    async def failed(self, sent: Sent, why: EngineError | OtherVersion | str) -> None:
        """The request was sent and has no answer that counts."""
        self.reason = str(why)
        if isinstance(why, EngineRefused) and (why.own_fault or NO_TOKEN_LEFT in why.seen):
            raise why
        life = await self._look(sent, why)
        if sent.lost and not isinstance(why, OtherVersion):
            self.reason = sent.why_lost()
            if sent.end is not None and getattr(why, "reached", True):
                await self._suspect(sent, sent.end)
        member = sent.member
        if isinstance(why, EngineUncalled):
            await self._back_off(None, None, most_s=LOCAL_S, error=why)
        elif sent.lost or isinstance(why, str | EngineProtocolError | OtherVersion):
            self._refusals, self._waited_s = 0, 0.0
            self._hard_failure()
        elif isinstance(why, EngineRefused):
            await self._back_off(member, why.retry_after_s)
        else:
            if life == "alive" and not member.held:
                self._hard_failure()
            await self._back_off(member, None)

    async def _look(self, sent: Sent, why: EngineError | OtherVersion | str) -> liveness.Life:
        """Look at the engine where its end may be why there is no answer; one broken connection isn't a dead engine.

        An engine whose schedulers are dead is busy until its HTTP process ends too: that is waited for, because it
        decides whether the request may be sent again.
        """
        broken = isinstance(why, EngineUnreachable | EngineTimeout)
        failed = isinstance(why, EngineRefused) and why.status is not None and why.status in FAILED
        if sent.lost or not (broken or failed):
            return "alive"
        until = time.monotonic() + DYING_S
        while True:
            life = await liveness.check(self.fleet, sent.member, str(getattr(why, "seen", why)))
            if life != "busy" or sent.lost or sent.member.held or time.monotonic() > until:
                return life
            await self.fleet.wait_changed(liveness.PAUSE_S)

    async def _suspect(self, sent: Sent, end: End) -> None:
        """Wait a moment for the engine to be back as the process that it was: then its network had been away, no more.
        Returns at once where no other engine could take the request meanwhile; `ready` waits then."""
        self._ended = sent, end
        self.fleet.quarantine.add(self._key(), sent.member.name, sent.member.reason, end)
        for _ in range(OFFERS):
            if self._survivors() or not self.fleet.routable():
                return
            if self.fleet.members.get(sent.member.name, sent.member).status == "retired":
                await offer_return(self.fleet)
            if not self._survivors():
                await self.fleet.wait_changed(OFFER_S)

    def _survivors(self) -> list[Member]:
        """Routable engines that are the process which seemed to have ended."""
        if self._ended is None:
            return []
        was = self._ended[0].instances
        return [m for m in self.fleet.routable() if was and m.instances == was]

    async def ready(self) -> None:
        """Return once there is an engine that the request may be sent to. Raises FleetError as `wait_routable`, and
        RequestQuarantined where an engine ended during it."""
        try:
            await wait_routable(self.fleet)
        except FleetError:
            if self._ended is not None:
                sent, _ = self._ended
                self.fleet.quarantine.give_up(self._key(), sent.member.name, sent.member.reason)
            raise
        if self._ended is None:
            return
        sent, end = self._ended
        if not self._survivors():
            engine, why = sent.member.name, sent.member.reason
            self.fleet.quarantine.give_up(self._key(), engine, why)
            raise RequestQuarantined(f"{engine} ended during this request ({why}); it is not sent to another engine")
        self.fleet.quarantine.acquit(self._key(), end)
        self._ended = None

    def _hard_failure(self) -> None:
        self._hard += 1
        if self._hard >= ATTEMPTS:
            raise self.given_up(self.reason)

    def given_up(self, reason: str) -> RequestLost:
        return RequestLost(f"no answer after {self.attempts} attempts; the last: {reason}")

    async def _back_off(
        self,
        member: Member | None,
        asked_s: float | None,
        *,
        most_s: float | None = None,
        error: Exception | None = None,
    ) -> None:
        """Wait for a while that doubles each time, or for what the engine asked; a change in the fleet ends it. Raises
        `error` after `most_s` (the fleet's `wait_s`) of such waiting in a row."""
        left = (self.fleet.wait_s if most_s is None else most_s) - self._waited_s
        if left <= 0:
            raise error or self.given_up(self.reason)
        pause = min(FIRST_BACKOFF_S * 2 ** min(self._refusals, 16), MOST_BACKOFF_S) * random.uniform(0.5, 1)
        self._refusals += 1
        self._refused_by = member or self._refused_by
        started = time.monotonic()
        await self.fleet.wait_changed(min(max(pause, asked_s or 0.0), left))
        if member is None or not member.held:  # a publication has deadlines of its own
            self._waited_s += time.monotonic() - started


async def generate(fleet: Fleet, body: Mapping[str, Any], *, on_retry: Callable[[str], None] | None = None) -> Answer:
    """One answer to `body` (SGLang's /generate, not streamed).

    Raises EngineRefused for a request that is itself wrong, RequestLost when nothing is left to try (see above),
    RequestQuarantined where an engine ended during it, EngineUncalled where this process can't call any, FleetError
    when no engine is routable for the fleet's `wait_s`.
    """
    retries = Retries(fleet, lambda: key_of(body.get("input_ids") or (), body.get("sampling_params") or {}))
    while True:
        await retries.ready()
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
    check_not_refused(sent.member.name, meta)
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        return f"{sent.member.name} aborted the request"
    sent.check_version(meta)
    return ""


def check_not_refused(engine: str, meta: Mapping[str, Any]) -> None:
    """Raise EngineRefused for an abort that is a refusal: SGLang ends a request so whose grammar it can't compile, as
    an answer with HTTP's status of it inside (0.5.23, srt/managers/schedule_batch.py, FINISH_ABORT)."""
    reason = meta.get("finish_reason") or {}
    status = reason.get("status_code")
    if reason.get("type") != "abort" or status is None:
        return
    error = EngineRefused(
        engine, "POST /generate", f"HTTP {int(status)}: {reason.get('message')}"[:300], status=int(status)
    )
    if error.own_fault:
        raise error


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
