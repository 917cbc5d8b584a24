"""slime's router (sglang-router): which engines it sends requests to. Blocking calls with deadlines."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from slime_backend.errors import ReefError

CALL_S = 10.0
LISTED_S = 60.0  # the router asks a new engine about itself before it routes to it
POLL_S = 0.1


class RouterError(ReefError, RuntimeError):
    """The router didn't do what was asked; the message names it and the engine."""


def _call(method: str, url: str) -> Any:
    request = urllib.request.Request(url, method=method)
    # Straight to it: the router is in the cluster, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=CALL_S) as response:
        text = response.read().decode("utf-8", "replace")
    return json.loads(text) if text.strip().startswith(("{", "[")) else text


def _workers(router: str) -> Iterator[dict[str, Any]]:
    yield from _call("GET", f"{router}/workers")["workers"]


def is_listed(router: str, engine: str) -> bool:
    """Whether the router sends requests to `engine` (both are base URLs). Raises OSError where it doesn't answer."""
    return any(w["url"] == engine and w.get("is_healthy", True) for w in _workers(router))


def wait_listed(router: str, engine: str) -> None:
    """Return once the router routes to `engine`. Raises RouterError after LISTED_S."""
    until = time.monotonic() + LISTED_S
    while True:
        try:
            if is_listed(router, engine):
                return
            seen = "it isn't in its list"
        except OSError as error:
            seen = str(error)
        if time.monotonic() > until:
            raise RouterError(f"router {router} took engine {engine}, but {seen} after {LISTED_S:g} s")
        time.sleep(POLL_S)


def remove(router: str, engine: str) -> None:
    """Take `engine` out; nothing happens where it isn't there. Raises RouterError."""
    until = time.monotonic() + CALL_S
    try:
        for worker in _workers(router):
            if worker["url"] == engine:
                _call("DELETE", f"{router}/workers/{worker['id']}")
        # The router answers before it has done it.
        while any(w["url"] == engine for w in _workers(router)):
            if time.monotonic() > until:
                raise RouterError(f"router {router} still lists engine {engine} {CALL_S:g} s after its removal")
            time.sleep(POLL_S)
    except (OSError, KeyError, ValueError) as error:
        raise RouterError(f"router {router} didn't remove engine {engine}: {type(error).__name__}: {error}") from error
