"""The gateway refuses requests that a browser sends for another site's page.

A page may make its visitor's browser send forms, images and plain POSTs to any address, this machine's own among them,
and a name that its owner controls may stand for 127.0.0.1 from one moment to the next. So, on every path that isn't
open:

    Host             an address, a name without a dot, the gateway's own host, or one of gateway.allowed_hosts; where
                     tokens are set, any: a foreign page has none
    Origin           none, or the same host
    Sec-Fetch-Site   not cross-site, nor same-site
    Content-Type     JSON, of everything that may change something: a browser asks before it sends that
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from reef_service.errors import ApiError

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN = frozenset({"cross-site", "same-site"})


class Origins:
    def __init__(self, hosts: Iterable[str], *, tokens: bool) -> None:
        """`hosts`: names that the gateway answers to, in addition to those that can't be anybody else's."""
        self.hosts, self.tokens = frozenset(host.lower() for host in hosts), tokens

    def refusal(self, method: str, headers: Mapping[bytes, str]) -> ApiError | None:
        """Return why a request for a path that isn't open is refused; None where it isn't."""
        host = headers.get(b"host", "")
        if not self.tokens and not self._is_ours(host):
            return ApiError(403, f"Host is {host[:80]!r}, which isn't this gateway; gateway.allowed_hosts may name it")
        origin = headers.get(b"origin")
        if origin is not None and (urlsplit_netloc(origin) != host.lower() or not host):
            return ApiError(403, f"Origin is {origin[:80]!r}: pages of other origins may not use this gateway")
        if headers.get(b"sec-fetch-site", "").lower() in _FOREIGN:
            return ApiError(403, "a page of another origin sent this; it may not use this gateway")
        if method not in _READING and not is_json(headers.get(b"content-type", "")):
            kind = headers.get(b"content-type", "").partition(";")[0][:80]
            return ApiError(415, f"content-type is {kind!r}; send JSON, as application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "." not in name and ":" not in name:
            return True  # a local name; also none at all, which no browser sends
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.hosts
        return True


def urlsplit_netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
