"""What all data-plane APIs share: who asks, how an answer is waited for, how a stream is sent."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from reef_service.api.headers import AGAIN, RECEIPT, SESSION, attempt_of, trains
from reef_service.api.headers import session_and_group as session_and_group
from reef_service.data_plane.answers import Delta, Done, TokenRequest
from reef_service.data_plane.engine_values import TABLE
from reef_service.data_plane.exchange import Exchange
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.prompts import Asked
from reef_service.data_plane.repeats import Replay
from reef_service.data_plane.workers import LARGE
from reef_service.errors import ApiError

T = TypeVar("T")
CLIENT_GONE = 499  # nobody reads it; it is for the access log


def engine_value(name: str) -> Any:
    """A field whose value the table of engine_values.py checks, once it is known whose vocabulary it is about: here it
    is only described."""
    return Field(None, json_schema_extra={"anyOf": [dict(TABLE[name].schema), {"type": "null"}]})


class Sampling(BaseModel):
    """Sampling settings that the APIs have in common, by OpenAI's names and SGLang's, as they were sent: prompts.py has
    them checked."""

    model_config = ConfigDict(extra="allow")

    temperature: Any = engine_value("temperature")
    top_p: Any = engine_value("top_p")
    top_k: Any = engine_value("top_k")
    min_p: Any = engine_value("min_p")
    frequency_penalty: Any = engine_value("frequency_penalty")
    presence_penalty: Any = engine_value("presence_penalty")
    repetition_penalty: Any = engine_value("repetition_penalty")
    ignore_eos: Any = engine_value("ignore_eos")
    min_tokens: Any = engine_value("min_new_tokens")
    stop_token_ids: Any = engine_value("stop_token_ids")
    seed: Any = engine_value("sampling_seed")

    def sampling(self) -> dict[str, Any]:
        """SGLang's sampling_params, without max_new_tokens. A temperature is always in it: it is recorded."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "min_new_tokens": self.min_tokens,
            "stop_token_ids": self.stop_token_ids,
            "sampling_seed": self.seed,
        }
        return with_temperature(named)


def with_temperature(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given of `named`, with a temperature in any case: it is recorded."""
    return {"temperature": 1.0, **{name: value for name, value in named.items() if value is not None}}


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else stop or []
    return tuple(text for text in found if text)


def plane_of(request: Request) -> DataPlane:
    plane: DataPlane = request.app.state.gateway.plane
    return plane


def new_receipt() -> str:
    return uuid.uuid4().hex


def now() -> int:
    return int(time.time())


def dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a model may write numbers of any size into a tool call, and halves of characters
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_answer(body: Mapping[str, Any], done: Done, *, again: bool = False) -> Response:
    headers = _headers(done.record.receipt, done, again=again)
    return Response(dumps(body), media_type="application/json", headers=headers)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + (data if isinstance(data, bytes) else dumps(data)) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends with the client. Raises ClientDisconnect then."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def prepared(request: Request, asked: Asked, work: Coroutine[Any, Any, TokenRequest]) -> TokenRequest:
    """The prompt in tokens; a large one's making ends with its client."""
    return await (work if asked.size < LARGE else unless_gone(request, work))


def size_of(request: Request) -> int:
    """Bytes of the body."""
    return len(getattr(request, "_body", b"")) or int(request.headers.get("content-length", 0))


async def respond(request: Request, asked: TokenRequest, render: Callable[[Done], Mapping[str, Any]]) -> Response:
    """The answer in one piece. A client that goes away meanwhile ends the request at the engine."""
    exchange = await _begin(request, asked)
    watch = asyncio.ensure_future(_gone(request.receive))
    watch.add_done_callback(lambda task: None if task.cancelled() else exchange.leave())
    try:
        done = await exchange.done()
    finally:
        watch.cancel()
    if exchange.abandoned:
        return Response(status_code=CLIENT_GONE)
    return json_answer(render(done), done, again=isinstance(exchange, Replay))


async def _begin(request: Request, asked: TokenRequest) -> Exchange | Replay:
    """The request on its way, or the answer that it had when it came before. Raises ApiError."""
    plane, attempt = plane_of(request), await attempt_of(request, asked.session)
    asked = replace(asked, attempt=attempt, train=trains(request))

    def make() -> Exchange:
        return Exchange(plane, asked, new_receipt())

    if not attempt.may_be_known:
        return plane.repeats.begin(attempt, make)
    found = await unless_gone(request, plane.repeats.find_or_begin(attempt, make))
    if isinstance(found, Replay):
        plane.metrics.replayed.inc()
    return found


async def respond_stream(
    request: Request,
    asked: TokenRequest,
    render: Callable[[AsyncIterator[Delta | Done], str], AsyncIterator[bytes]],
    error_event: Callable[[ApiError], bytes],
) -> Response:
    """The answer as it comes. What fails before the first token is an error with its own status."""
    exchange = await _begin(request, asked)
    watch = asyncio.ensure_future(_gone(request.receive))
    watch.add_done_callback(lambda task: None if task.cancelled() else exchange.leave())
    events = exchange.events()
    try:
        first = await anext(events)
    except BaseException:
        watch.cancel()
        exchange.leave()
        raise

    async def all_events() -> AsyncIterator[Delta | Done]:
        yield first
        if not isinstance(first, Done):
            async for following in events:
                yield following

    return _EventStream(exchange, watch, render(all_events(), exchange.receipt), error_event)


class _EventStream(Response):
    """Server-sent events of one exchange."""

    def __init__(
        self,
        exchange: Exchange | Replay,
        watch: asyncio.Future[None],
        pieces: AsyncIterator[bytes],
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers=_headers(exchange.receipt, again=isinstance(exchange, Replay))
        )
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._exchange, self._watch, self._pieces, self._error_event = exchange, watch, pieces, error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(piece: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for piece in self._pieces:
                    if not self._exchange.abandoned:
                        await body(piece)
            except ApiError as error:
                await body(self._error_event(error))
            await body(b"", more=False)
        finally:
            self._watch.cancel()
            self._exchange.leave()


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(receipt: str, done: Done | None = None, *, again: bool = False) -> dict[str, str]:
    headers = {RECEIPT: receipt} | ({AGAIN: "true"} if again else {})
    if done is not None:
        headers[SESSION] = done.record.session
    return headers
