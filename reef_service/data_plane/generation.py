"""One request on the fleet: sent to a confirmed engine, sent again where that is lost, ended early when asked.

    nothing passed on yet    the request is sent again from the start: what the lost engine sampled is thrown away
    the engine ended         given up: it is sent to no second engine (slime_backend/quarantine.py)
    tokens passed on         the client holds them, so another engine goes on after them, from their ids; they stay
                             what they are, sampled by an engine that was confirmed then, but nothing proves from which
                             KV: `spliced` records it
    ended early              the engine is asked to abort and gives what it has with its provenance, within STOP_S

An engine that is retired is not read a moment longer: no token of an unconfirmed engine is passed on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from slime_backend.engine_client import EngineError, EngineProtocolError, EngineRefused, EngineUnreachable
from slime_backend.fleet import Fleet, Member
from slime_backend.fleet.dispatch import OtherVersion, Retries, Sent, check_not_refused
from slime_backend.fleet.quarantine import key_of
from slime_backend.provenance.record_checks import why_no_logprobs

STOP_S = 10.0  # for the engine's last word after an abort
PACE_S, MOST_PACE_S = 0.001, 0.1  # between two looks at a stream, for each request under way; at most
Answers = AsyncIterator[list[dict[str, Any]]]  # each time those that have come since


class NoLogprobs(EngineProtocolError):
    """A log-prob is no number: of NaN in the weights, which other engines have too, so it is sent to none."""


@dataclass(slots=True)
class Generation:
    """A generation holds what is sampled so far. `run` yields (from, to) over `output_ids` whenever there is more.

    Log-probs are natural, by the version that sampled the token, as the engine gave them.
    """

    fleet: Fleet
    choose: Callable[[list[Member]], Member]
    receipt: str
    prompt_ids: list[int]
    sampling: Mapping[str, Any]  # SGLang's sampling_params, with max_new_tokens
    stream: bool
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of /generate
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)  # of the last answer
    engine: str = ""
    attempts: int = 0
    spliced: bool = False
    stopped: bool = False
    submitted_at: float = field(default_factory=time.time)
    _member: Member | None = None
    _close: Callable[[], Any] | None = None  # ends the call that is under way
    _stopping: asyncio.Task[None] | None = None

    @property
    def finish_reason(self) -> Mapping[str, Any]:
        """SGLang's, e.g. {"type": "stop", "matched": 42}; empty before the end."""
        return self.meta.get("finish_reason") or {}

    async def run(self) -> AsyncIterator[tuple[int, int]]:
        """Raises EngineRefused for a request that is itself wrong, NoLogprobs, RequestLost or FleetError with no engine
        left, RequestQuarantined where an engine ended during it, EngineUncalled where this process can't call any."""
        retries = Retries(self.fleet, lambda: key_of(self.prompt_ids, self.sampling))
        while True:
            await retries.ready()
            self.attempts = retries.attempts = retries.attempts + 1
            why: EngineError | OtherVersion | str = ""
            with self.fleet.routed(lambda found: self.choose(retries.others(found))) as member:
                self._member, self.engine = member, member.name
                sent = Sent(self.fleet, member)
                base = len(self.output_ids)
                self.spliced = self.spliced or base > 0
                try:
                    async with self._answers(sent) as answers:
                        async for found in answers:
                            if sent.lost:
                                why = sent.why_lost()
                                break
                            start = len(self.output_ids)
                            self._take(found, base, sent)
                            if len(self.output_ids) > start:
                                yield start, len(self.output_ids)
                        else:
                            return
                except (EngineError, OtherVersion) as error:
                    why = error
                finally:
                    self._member = self._close = None
                    if self._stopping is not None:
                        self._stopping.cancel()
            if isinstance(why, NoLogprobs) or (isinstance(why, EngineRefused) and why.own_fault):
                raise why
            if not self.stopped and self._left() < 1:  # the lost engine had sampled the last token, and not reported it
                self.meta = {**self.meta, "finish_reason": {"type": "length"}}
                self.spliced = True
                return
            if self.stopped:  # nobody waits for more
                raise retries.given_up(str(why))
            await retries.failed(sent, why)

    def stop(self) -> None:
        """Ask the engine to end the request; `run` goes on to the engine's last answer."""
        if not self.stopped:
            self.stopped = True
            if self._member is not None and self._close is not None:
                self._stopping = asyncio.ensure_future(self._abort(self._member, self._close))

    def truncate(self, length: int) -> None:
        """Forget what was sampled after the first `length` tokens."""
        del self.output_ids[length:], self.logprobs[length:]

    async def _abort(self, member: Member, close: Callable[[], Any]) -> None:
        with suppress(EngineError):  # an engine that can't be reached samples for nobody
            await member.client.abort(self._rid())
        await asyncio.sleep(STOP_S)
        close()

    def _rid(self) -> str:
        # SGLang takes an aborted id as a beginning, so no attempt's id may begin like another's.
        return f"{self.receipt}.{self.attempts:02d}"

    def _pace(self) -> float:
        """The more streams, the longer each is left alone after a look at it: all of them together cost the same then,
        and a first token doesn't wait for the others' next ones."""
        return min(PACE_S * sum(m.in_flight for m in self.fleet.members.values()), MOST_PACE_S)

    def _left(self) -> int:
        return int(self.sampling["max_new_tokens"]) - len(self.output_ids)

    def _body(self) -> dict[str, Any]:
        sampling = {**self.sampling, "max_new_tokens": self._left()}
        if self.output_ids and sampling.get("min_new_tokens"):
            sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - len(self.output_ids))
        return {
            **self.extra,
            "rid": self._rid(),
            "input_ids": [*self.prompt_ids, *self.output_ids],
            "return_logprob": True,
            "sampling_params": sampling,
        }

    @asynccontextmanager
    async def _answers(self, sent: Sent) -> AsyncIterator[Answers]:
        """The engine's answers, cut off as soon as it is retired: a dead or paused engine may never answer."""
        member = sent.member
        if self.stream:
            async with member.client.generate_stream(self._body()) as stream:
                self._close = stream.close
                with _when_gone(sent.gone, stream.close):
                    yield stream.answers(self._pace)
            return
        call = asyncio.ensure_future(member.client.generate(self._body()))
        self._close = call.cancel
        try:
            with _when_gone(sent.gone, call.cancel):
                yield _one(call, member)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    def _take(self, answers: Sequence[Mapping[str, Any]], base: int, sent: Sent) -> None:
        """Append what is new in answers that came together: one that repeats all tokens of this attempt, or several
        that have the new ones only."""
        meta = answers[-1]["meta_info"]
        check_not_refused(self.engine, meta)
        if not self.stopped and _aborted(answers[-1]):
            raise EngineProtocolError(self.engine, "POST /generate", "it aborted the request")
        sent.check_version(meta)
        ids = [token for answer in answers for token in answer["output_ids"]]
        new = int(meta.get("completion_tokens", len(ids))) - (len(self.output_ids) - base)
        if new > 0:
            entries = [entry for answer in answers for entry in answer["meta_info"].get("output_token_logprobs") or ()]
            logprobs = [entry[0] if entry else None for entry in entries[-new:]]
            ids = ids[-new:]
            if len(ids) != new or len(logprobs) != new:
                raise EngineProtocolError(
                    self.engine,
                    "POST /generate",
                    f"{len(ids)} tokens and {len(logprobs)} log-probs where {new} are new",
                )
            if why := why_no_logprobs(logprobs, meta, len(self.output_ids) - base):
                raise NoLogprobs(self.engine, "POST /generate", f"rollout {self.receipt}: {why}")
            self.output_ids += ids
            self.logprobs += [float(logprob) for logprob in logprobs if logprob is not None]  # none is: checked above
        self.meta = {k: v for k, v in meta.items() if k != "output_token_logprobs"}


def _aborted(answer: Mapping[str, Any]) -> bool:
    return (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort"


async def _one(call: asyncio.Future[dict[str, Any]], member: Member) -> Answers:
    try:
        yield [await call]
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # we are meant, not the call
            raise
        raise EngineUnreachable(member.name, "POST /generate", "given up") from None


class _when_gone:
    """with _when_gone(gone, end): calls `end` the moment the member loses its confirmation."""

    def __init__(self, gone: asyncio.Event, end: Callable[[], Any]) -> None:
        self._task = asyncio.ensure_future(gone.wait())
        self._task.add_done_callback(lambda task: None if task.cancelled() else end())

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self._task.cancel()
