"""Clients' connections, bounded in number, in time and in what comes before a body.

    idle     nothing of a request has come     `idle_s`; the first request of a connection must come within `head_s`
    head     its headers are coming            `head_s`, MAX_HEAD bytes
    body     its body is coming                `body_s`
    answer   as long as it takes

At `most` connections the one that has been without a request for the longest makes room for a new one; where each has a
request, the new one is refused and asked to retry.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reef_service.errors import ApiError

MAX_HEAD = 65_536  # bytes: of the first line with the headers, and of what a chunked body has in addition to its data
LINGER_S = 1.0  # for a client to read why it is turned away
LINGERING = 32  # of these at once
_NAMES = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}
Part = Literal["idle", "head", "body", "done"]


@dataclass(slots=True, eq=False)
class Connections:
    """The bounds, and the connections of one server."""

    most: int = 4096
    head_s: float = 15.0
    body_s: float = 120.0
    idle_s: float = 75.0
    turned_away: int = 0
    timed_out: int = 0
    evicted: int = 0
    open: set[BoundedHttp] = field(default_factory=set)
    idle: OrderedDict[BoundedHttp, None] = field(default_factory=OrderedDict)  # without a request, oldest first
    lingering: int = 0

    def has_room(self) -> bool:
        """Return whether one more may be opened, closing an idle one where that is needed."""
        if len(self.open) < self.most:
            return True
        if not self.idle:
            return False
        self.evicted += 1
        next(iter(self.idle)).drop()
        return True


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with `bounds` of its subclass (`bounded`)."""

    bounds: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part: Part = "idle"
        self._bytes = 0  # of the head that is coming; in a body, since the last data of it
        self._timer: asyncio.TimerHandle | None = None
        self._away = False  # nothing that comes is looked at any more
        self._lingers = False

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if not self.bounds.has_room():
            self.bounds.turned_away += 1
            self._turn_away(ApiError(503, "the gateway has no connection left; try again", retry_after=1))
            return
        super().connection_made(transport)
        self.bounds.open.add(self)
        self._enter("idle", self.bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._forget()
        if self._lingers:
            self._lingers = False
            self.bounds.lingering -= 1
        if self.flow is not None:
            super().connection_lost(exc)

    def drop(self) -> None:
        """End the connection, whatever it is at."""
        self._away = True
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self.bounds.open.discard(self)
        self.bounds.idle.pop(self, None)

    def _turn_away(self, error: ApiError) -> None:
        """Say why, and close. What comes meanwhile is thrown away: unread, it would take the answer with it."""
        self._away = True
        self._stop_timer()
        self._forget()
        body = json.dumps(error.body("")).encode()
        lines = [f"HTTP/1.1 {error.status} {_NAMES[error.status]}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        if self.bounds.lingering >= LINGERING or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._lingers = True
        self.bounds.lingering += 1
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    # ---- what comes

    def data_received(self, data: bytes) -> None:
        if self._away:
            return
        self._bytes += len(data)
        super().data_received(data)
        # In a body `_bytes` counts from its last data on: chunks' own lines, and trailers.
        if not self._away and self._part in ("idle", "head", "body") and self._bytes > 2 * MAX_HEAD:
            self._too_large()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter("head", self.bounds.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "body":  # a trailer: nobody asks for it
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._away or size > MAX_HEAD:
            if not self._away:
                self._too_large()
            return
        self._enter("body", self.bounds.body_s)
        self._bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        if not self._away:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._away:
            return
        self._enter("done", None)
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._enter("idle", self.bounds.idle_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._part == "done" and not self._away and not self.transport.is_closing() and not self.pipeline:
            self._enter("idle", self.bounds.idle_s)

    # ---- time

    def _enter(self, part: Part, seconds: float | None) -> None:
        self._part, self._bytes = part, 0 if part in ("idle", "done") else self._bytes
        self._stop_timer()
        if part in ("idle", "head"):
            self.bounds.idle.setdefault(self, None)
        else:
            self.bounds.idle.pop(self, None)
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete and self._part in ("idle", "head"):
            return  # the answer before it is still being sent
        self.bounds.timed_out += 1
        if self._part == "idle" or (self.cycle is not None and self.cycle.response_started and self._part == "body"):
            self.drop()
            return
        cycle, late = self.cycle, f"the request's {self._part} took too long"
        self._turn_away(ApiError(408, late))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _too_large(self) -> None:
        self._turn_away(ApiError(431, f"the headers have more than {MAX_HEAD} bytes"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(bounds: Connections) -> type[BoundedHttp]:
    """The protocol's class for one server."""
    return type("BoundedHttp", (BoundedHttp,), {"bounds": bounds})
