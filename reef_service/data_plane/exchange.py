"""One request from the gate to the store: text comes out while tokens come in, and the end is sent once it is stored.

    gate -> generation -> text, stop texts, pieces -> store -> Done

A task of its own does all this, so a client that goes away ends the request at the engine, but not its record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from reef_service.data_plane.answers import Answer, Delta, Done, TokenRequest
from reef_service.data_plane.generation import Generation, NoLogprobs
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.recording import record_of, record_without_answer, state_of
from reef_service.data_plane.stored_answers import to_text
from reef_service.errors import ApiError
from reef_service.store import StoreError
from reef_service.store.turns import CONTINUABLE, Turn, TurnState
from reef_service.text.answer_parser import Piece, held
from reef_service.text.tokenizer import TextStream
from slime_backend.engine_client import EngineRefused, EngineUncalled
from slime_backend.fleet import FleetError
from slime_backend.fleet.dispatch import RequestLost, RequestQuarantined
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.records import RolloutRecord

log = logging.getLogger(__name__)


class Exchange:
    """async for event in exchange.events(): Delta ... Delta, Done. Raises ApiError."""

    def __init__(self, plane: DataPlane, request: TokenRequest, receipt: str) -> None:
        self.plane, self.request, self.receipt = plane, request, receipt
        self.session = request.session or receipt
        self.answer = Answer()
        self.stop_text: str | None = None
        self.abandoned = False
        self.answered = False  # it is stored, and the client may have it
        self._joined = 0  # requests that came again and wait for the same answer
        self._left = False  # by its own client
        self._outcome: Done | ApiError | None = None
        self._over = False  # its end is sent: nothing can be abandoned any more
        self._text = TextStream(plane.tokenizer)
        self._unsent = ""  # text that may be the beginning of a stop text
        self._count = 0  # tokens that the text is of
        self._sent = 0  # tokens that were handed on
        self._events: asyncio.Queue[Delta | Done | ApiError] = asyncio.Queue()
        self._generation: Generation | None = None
        self.task = asyncio.create_task(self._run())
        plane.exchanges.add(self)
        self.task.add_done_callback(lambda task: plane.exchanges.discard(self))

    async def events(self) -> AsyncIterator[Delta | Done]:
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, ApiError):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
        finally:
            self.leave()

    def leave(self) -> None:
        """The client has gone; it is ended unless the same request came again and waits."""
        self._left = True
        if not self._joined:
            self.abandon()

    async def join(self) -> Done | None:
        """The end, for a request that came again; None where this one was ended before it had an answer.

        Raises ApiError where it failed.
        """
        self._joined += 1
        try:
            await asyncio.wait((self.task,))
        finally:
            self._joined -= 1
            if self._left:
                self.leave()
        if isinstance(self._outcome, ApiError) and not self.abandoned:
            raise self._outcome
        return self._outcome if isinstance(self._outcome, Done) and self.answered else None

    def abandon(self) -> None:
        """End it: nothing happens to a request that has ended."""
        if self._over or self.abandoned:
            return
        self.abandoned = True
        if self._generation is None:
            self.task.cancel()  # still at the gate: there is nothing to record
        else:
            self._generation.stop()

    async def done(self) -> Done:
        """The end, without what comes before it."""
        async for event in self.events():
            if isinstance(event, Done):
                return event
        raise AssertionError("events end with Done or raise")

    async def _run(self) -> None:
        try:
            async with self.plane.gate.passed():
                self._end(await self._generate())
        except ApiError as error:
            self._end(error)
        except asyncio.CancelledError:
            self._end(ApiError(503, "the gateway is stopping; try again", retry_after=5))
            raise
        except Exception:
            log.exception("request %s failed", self.receipt)
            self._end(ApiError(500, f"the gateway failed; its log has the reason (receipt {self.receipt})"))

    def _end(self, event: Done | ApiError) -> None:
        self._over = True
        self._events.put_nowait(event)
        self._outcome = event
        self.answered = isinstance(event, Done) and event.state in CONTINUABLE

    async def _generate(self) -> Done:
        request = self.request
        generation = self.plane.generation(request, self.receipt)
        self._generation = generation
        try:
            async for start, end in generation.run():
                if not self.abandoned and self.stop_text is None:
                    self._show(generation, start, end)
        except EngineRefused as error:
            raise ApiError(400, f"the engine refuses this request: {error.seen}") from error
        except NoLogprobs as error:
            log.error("request %s: %s", self.receipt, error)
            await self._store_failure(generation, "no log-probs")
            raise ApiError(502, f"the answer can't be used: {error}", code="no_logprobs", should_retry=False) from error
        except EngineUncalled as error:
            await self._store_failure(generation)
            raise ApiError(
                503,
                f"the gateway itself is short of something: {error.seen}; try again",
                code="overloaded",
                retry_after=1,
            ) from error
        except RequestQuarantined as error:
            await self._store_failure(generation)
            # Not 503: a client that sends it again by itself would end the next engine with it.
            status, code = (422, "quarantined") if error.again else (502, "engine_ended")
            raise ApiError(status, f"this request is quarantined: {error}", code=code, should_retry=False) from error
        except (RequestLost, FleetError) as error:
            await self._store_failure(generation)
            raise ApiError(503, f"no engine answered: {error}", code="no_engine", retry_after=5) from error
        if self.stop_text is None and not self.abandoned:
            self._show(generation, len(generation.output_ids), len(generation.output_ids), last=True)
        return await self._store(generation)

    def _show(self, generation: Generation, start: int, end: int, *, last: bool = False) -> None:
        """Turn tokens into pieces and hand them on; with a stop text in them, stop there."""
        request, text = self.request, ""
        step = 1 if request.stop else max(1, end - start)  # a stop text must be found at its token
        for at in range(start, end, step):
            self._count = min(end, at + step)
            text += self._text.push(generation.output_ids[at : self._count])
            if request.stop and self._find_stop(generation, text):
                generation.stop()
                return
        if last:
            text += self._text.push((), last=True)
            if request.stop and self._find_stop(generation, text):
                return
        self._unsent += text
        kept = 0 if last else held(self._unsent, list(request.stop))
        ready = self._unsent[: len(self._unsent) - kept]
        self._unsent = self._unsent[len(ready) :]
        self._hand_on(generation, ready, last=last)

    def _find_stop(self, generation: Generation, text: str) -> bool:
        pending = self._unsent + text
        places = [(pending.find(stop), stop) for stop in self.request.stop if stop in pending]
        if not places:
            return False
        place, self.stop_text = min(places)
        stays = self.request.keep_stop or self.stop_text == self.request.closing
        kept = pending[: place + (len(self.stop_text) if stays else 0)]
        self._unsent = ""
        self._hand_on(generation, kept, last=True)
        return True

    def _hand_on(self, generation: Generation, text: str, *, last: bool = False) -> None:
        self.answer.raw += text
        parser = self.request.parser
        if parser is None:
            pieces = [Piece("content", text)] if text else []
        else:
            pieces = parser.push(text) + (parser.finish() if last else [])
        for piece in pieces:
            self.answer.add(piece)
        new = slice(self._sent, self._count)
        self._sent = self._count
        delta = Delta(pieces, generation.output_ids[new], generation.logprobs[new])
        if pieces or delta.ids:
            self._events.put_nowait(delta)

    async def _store(self, generation: Generation) -> Done:
        request = self.request
        if self.stop_text is not None:
            generation.truncate(self._count)  # the engine went on until it was aborted
        state = state_of(generation, abandoned=self.abandoned)
        finish = "stop" if self.stop_text is not None else str(generation.finish_reason.get("type", "unknown"))
        about = {"session": self.session, "label": request.label}
        temperature = float(request.sampling.get("temperature", 1.0))  # 0 is greedy, and recorded as what it is
        generation.meta["finish_reason"] = {**generation.finish_reason, "type": finish}
        try:
            record = record_of(generation, temperature=temperature, **about)
        except RecordError as error:
            if not self.abandoned:
                raise ApiError(502, f"the engine's answer can't be recorded: {error}") from error
            record = record_without_answer(generation, temperature=temperature, reason=finish, **about)
        return await self._keep(record, state, generation)

    async def _store_failure(self, generation: Generation, reason: str = "lost") -> None:
        about = {"session": self.session, "label": self.request.label}
        temperature = float(self.request.sampling.get("temperature", 1.0))
        record = record_without_answer(generation, temperature=temperature, reason=reason, **about)
        await self._keep(record, "disconnected" if self.abandoned else "failed", generation)

    async def _keep(self, record: RolloutRecord, state: TurnState, generation: Generation) -> Done:
        request = self.request
        tokens = [*record.prompt_ids, *record.output_ids]
        history = request.history(self.answer, tokens)
        finish = "tool_calls" if self.answer.calls and record.finish_reason == "stop" else record.finish_reason
        attempt = request.attempt
        kept = to_text(self.answer, finish, self.stop_text, generation.meta) if attempt.names else ""
        turn = Turn(
            record,
            request.parent,
            request.api,
            state,
            request.label,
            history,
            train=request.train,
            request=attempt.request,
            answer=kept,
            key=attempt.key,
        )
        try:
            placed = await self.plane.store.add_turn(turn)
        except StoreError as error:
            log.error("turn %s is not stored: %s", record.receipt, error)
            raise ApiError(
                503, "the answer could not be stored, so it is not given; try again", retry_after=1
            ) from error
        if state in CONTINUABLE and request.session:
            self.plane.sessions.add(request.session, record.receipt, history, tokens)
        self.plane.metrics.turn(record, state, request.api)
        cached = int(generation.meta.get("cached_tokens") or 0)
        stop = None if self.stop_text == request.closing else self.stop_text
        return Done(record, state, self.answer, finish, stop, cached, generation.meta, placed.trajectory)
