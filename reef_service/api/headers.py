"""The headers that requests to the engines may have: whose turn it is, whether it trains, whether it comes again."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

from fastapi import Request

from reef_service.data_plane.answers import Attempt
from reef_service.errors import bad_request

SESSION, GROUP, RECEIPT = "x-reef-session", "x-reef-group", "x-reef-receipt"
TRAIN, AGAIN = "x-reef-train", "x-reef-replayed"
KEY, RETRY = "idempotency-key", "x-stainless-retry-count"  # the latter: of OpenAI's and Anthropic's clients
MUCH = 1 << 20  # bytes whose digest isn't made on the event loop
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_MARKS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NAME = re.compile(r"[A-Za-z0-9._:@/+-]{1,200}")


def session_and_group(request: Request) -> tuple[str, str]:
    """(session, group) that the headers name, "" where they don't. Raises ApiError 400."""
    found = []
    for header in (SESSION, GROUP):
        value = request.headers.get(header, "")
        if value and not _NAME.fullmatch(value):
            raise bad_request(f"{header} must be 1 to 200 letters, digits or any of ._:@/+-")
        found.append(value)
    return found[0], found[1]


async def attempt_of(request: Request, session: str) -> Attempt:
    """Raises ApiError 400 for a key that is none."""
    key, count = request.headers.get(KEY, ""), request.headers.get(RETRY, "")
    if key and not _KEY.fullmatch(key):
        raise bad_request(f"{KEY} must be 1 to 255 printable characters of ASCII")
    if not key and not session:
        return Attempt()
    path, body = f"{request.url.path}\n".encode(), getattr(request, "_body", b"")
    digest = _digest(path, body) if len(body) < MUCH else await asyncio.to_thread(_digest, path, body)
    return Attempt(session, digest, key, retry=count.isdecimal() and int(count) > 0)


def _digest(path: bytes, body: bytes) -> str:
    found = hashlib.sha256(path)
    found.update(body)
    return found.hexdigest()


def trains(request: Request) -> bool:
    """Raises ApiError 400 for a mark that is none."""
    value = request.headers.get(TRAIN, "true").lower()
    if value not in _MARKS:
        raise bad_request(f"{TRAIN} must be true or false")
    return _MARKS[value]


def describe_headers() -> list[dict[str, Any]]:
    """The request headers of the APIs that answer from the engines, as OpenAPI has parameters."""
    name = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
    key = {"type": "string", "pattern": f"^{_KEY.pattern}$"}
    described = (
        (SESSION, name, "the conversation that the request belongs to"),
        (GROUP, name, "what the session is compared with"),
        (TRAIN, {"type": "string", "enum": [*_MARKS]}, "false: this branch of the session is not to be trained on"),
        (KEY, key, "the same key is the same request, which gets the answer that there is"),
    )
    return [
        {"name": header, "in": "header", "required": False, "description": text, "schema": schema}
        for header, schema, text in described
    ]
