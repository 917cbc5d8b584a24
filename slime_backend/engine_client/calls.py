"""Calls to one SGLang engine: each has a deadline, and each failure is one of four typed errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from slime_backend.engine_client.errors import (
    Deadlines,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    no_answer,
    one_line,
    refused,
)
from slime_backend.engine_client.http import HttpChannel
from slime_backend.engine_client.json_text import loads
from slime_backend.engine_client.keys import EngineKeys

SERVER_PATHS = frozenset({"/model_info", "/get_model_info"})  # answered without the schedulers


class EngineCalls:
    """Makes any call to the engine at `url`; EngineClient adds a method for each that is used."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        deadlines: Deadlines | None = None,
        keys: EngineKeys | None = None,
    ) -> None:
        """`keys`: what an engine with --api-key or --admin-api-key wants with each call."""
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.deadlines = deadlines or Deadlines()
        self._keys = keys or EngineKeys()
        self._channel = HttpChannel(self.url, self._keys.header)
        self._serves_reports = True  # until it says that it has no such route
        self.instances: frozenset[str] = frozenset()  # the scheduler processes that reported last
        self.silent_since: float | None = None  # liveness.py: schedulers didn't answer since; time.monotonic()

    async def close(self) -> None:
        self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """One HTTP call. Returns the parsed JSON, or the text where the engine answers text. `repeatable`: as in
        HttpChannel.request.

        Raises EngineUnreachable, EngineTimeout, EngineRefused (status >= 400, or `"success": false`).
        """
        seconds = self.deadlines.control if deadline is None else deadline
        what = f"{method} {path}"
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            status, raw, retry_after = await self._channel.request(
                method, path, content, seconds, repeatable=repeatable
            )
        except TimeoutError as error:
            raise EngineTimeout(self.name, what, f"no answer within {seconds:g} s") from error
        except ConnectionError as error:
            raise no_answer(self.name, what, error) from error
        raw = self._keys.explained(status, path, raw)
        if status >= 400:
            raise refused(self.name, what, status, raw, retry_after)
        if path not in SERVER_PATHS:
            self.silent_since = None
        try:
            parsed = loads(raw)
        except ValueError:
            return raw.decode("utf-8", "replace")
        if isinstance(parsed, dict) and parsed.get("success") is False:
            raise EngineRefused(self.name, what, one_line(str(parsed.get("message", parsed))))
        return parsed

    async def _get_either(self, path: str, older: str) -> Any:
        """GET `path`, or the name that it had before (both are served for a while, then only the new one)."""
        try:
            return await self._read(path)
        except EngineRefused as error:
            if not is_absent(error):
                raise
        return await self._read(older)

    async def _read(self, path: str, deadline: float | None = None) -> Any:
        """GET `path`, which changes nothing, so that it can be asked for once more where its answer is lost, or isn't
        there after half of the deadline."""
        return await self._asked_again("GET", path, deadline=deadline)

    async def _asked_again(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, deadline: float | None = None
    ) -> Any:
        seconds = self.deadlines.control if deadline is None else deadline
        try:
            return await self.call(method, path, body=body, deadline=seconds / 2, repeatable=True)
        except (EngineUnreachable, EngineTimeout):
            return await self.call(method, path, body=body, deadline=seconds, repeatable=True)


def is_absent(error: EngineRefused) -> bool:
    """Return whether the engine has no such endpoint."""
    return error.status == 404
