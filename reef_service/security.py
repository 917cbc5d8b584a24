"""Who may do what: two tokens, compared in constant time, and a bound on bodies. An ASGI layer around everything.

    open    /healthz /readyz, the page and the API's description: they reveal nothing
    agent   /v1/... /generate /reef/report /reef/turns: the agent's token, or the admin's
    admin   everything else

Without tokens, which only a loopback address may do without, everybody who reaches the gateway may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef_service.errors import ApiError
from reef_service.origin import Origins
from slime_backend.config import ConfigError

Role = Literal["open", "agent", "admin"]
_OPEN = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")
_OPEN_UNDER = ("/static/", "/docs-assets/")
_AGENT = ("/generate", "/reef/report")
_AGENT_UNDER = ("/v1/", "/reef/turns/")
MOST_ELSEWHERE = 2**20  # bytes of a body that is no prompt
MOST_DISCARDED = 2**25  # bytes of a body that is too large, and whose sender is to read why
MIN_TOKEN = 16  # characters


class Tokens:
    """Kept as digests, so that comparing takes as long for a wrong length as for a wrong letter."""

    def __init__(self, agent: str | None, admin: str | None) -> None:
        self._agent, self._admin = (None if t is None else _digest(t) for t in (agent, admin))

    @property
    def none(self) -> bool:
        """Return whether everybody may do everything."""
        return self._agent is None and self._admin is None

    def role(self, shown: str | None) -> Role:
        """Return the role of a client that shows this token."""
        if self.none:
            return "admin"
        digest = _digest(shown or "")
        # Both are always compared: how long it takes reveals nothing.
        admin = hmac.compare_digest(digest, self._admin or b"\0" * len(digest))
        agent = hmac.compare_digest(digest, self._agent or b"\0" * len(digest))
        if shown is None:
            return "open"
        return "admin" if admin else "agent" if agent else "open"


def read_token(path: Path | None) -> str | None:
    """The first line of a token file. Raises ConfigError, without the token in it."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError) as error:
        raise ConfigError(f"token file {path} can't be read or is empty") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"token file {path} is not UTF-8") from error
    if len(token) < MIN_TOKEN:
        raise ConfigError(f"token file {path}: a token has at least {MIN_TOKEN} characters")
    return token


def needed(path: str) -> Role:
    if path in _OPEN or path.startswith(_OPEN_UNDER):
        return "open"
    if path in _AGENT or path.startswith(_AGENT_UNDER):
        return "agent"
    return "admin"


def _is_prompt(path: str) -> bool:
    return path == "/generate" or path.startswith("/v1/")


class Guard:
    """The ASGI layer."""

    def __init__(self, app: ASGIApp, tokens: Tokens, max_body: int, hosts: Iterable[str] = ()) -> None:
        """`hosts`: names that the gateway is reached by (origin.py)."""
        self.app, self.tokens, self.max_body = app, tokens, max_body
        self.origins = Origins(hosts, tokens=not tokens.none)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET, whose body the server then leaves out
            scope = {**scope, "method": "GET"}
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        error = self._refusal(scope["method"], scope["path"], headers)
        if error is not None:
            length = headers.get(b"content-length", "")
            if error.status == 413 and length.isdigit() and int(length[:20]) <= MOST_DISCARDED:
                await _discard(receive)
            await _answer(error, scope["path"], _closing(send) if has_body else send)
        elif needed(scope["path"]) == "open":  # anybody may ask, so nothing that they send is read
            await self.app(scope, _Nothing(receive), _closing(send) if has_body else send)
        elif b"content-length" in headers or not has_body:
            await self.app(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    def _most(self, path: str) -> int:
        """Bytes of a body: prompts are large, and parsed where that stops nobody; nothing else is."""
        return self.max_body if _is_prompt(path) else min(self.max_body, MOST_ELSEWHERE)

    def _refusal(self, method: str, path: str, headers: dict[bytes, str]) -> ApiError | None:
        role, wanted = self.tokens.role(_shown(headers)), needed(path)
        if wanted == "admin" and role == "agent":
            return ApiError(403, "this needs the admin token")
        if wanted != "open" and role == "open":
            return ApiError(401, "no valid token: send it as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`")
        length, most = headers.get(b"content-length", ""), self._most(path)
        if length and (not length.isdigit() or int(length[:20]) > most):
            return ApiError(413, f"the body is larger than {most} bytes")
        # The data plane refuses a wrong content type with a message of its own (lane.py).
        if "\0" in path:
            return ApiError(404, "there is no such path")
        return None if wanted == "open" else self.origins.refusal("GET" if _is_prompt(path) else method, headers)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body of unknown length is read up to the bound before anybody sees it."""
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            more = message.get("more_body", False)
            if size > (most := self._most(scope["path"])):
                error = ApiError(413, f"the body is larger than {most} bytes")
                await _answer(error, scope["path"], _closing(send))
                return
        body = b"".join(pieces)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


class _Nothing:
    """A request's body, as none; then what follows it, which is the client's going."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._given = receive, False

    async def __call__(self) -> Message:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await self._receive())["type"] == "http.request":  # thrown away: one piece at a time
            pass
        return message


async def _discard(receive: Receive) -> None:
    """Read a body, piece by piece, and keep nothing: a client that still sends doesn't see the answer to it."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
        pass


def _closing(send: Send) -> Send:
    """Ends the connection with the answer: what is left of the body is not read."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


def _shown(headers: dict[bytes, str]) -> str | None:
    kind, _, token = headers.get(b"authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return headers.get(b"x-api-key")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def _answer(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
