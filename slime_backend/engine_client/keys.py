"""The keys that SGLang servers ask for (--api-key, --admin-api-key), and which call needs which.

SGLang 0.5.23 (srt/utils/auth.py): requests and what describes the server want --api-key where it is set; what controls
an engine wants --admin-api-key where that is set, else --api-key. A key is read from an environment variable, so that
none stands in a configuration, a run directory or a command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from slime_backend.errors import ReefError
from slime_backend.wire import REPORTS_PATH

API_VARIABLE = "REEF_SLIME_ENGINE_API_KEY"
ADMIN_VARIABLE = "REEF_SLIME_ENGINE_ADMIN_API_KEY"
# Calls that want --api-key and never the other one. Ours is a plain route of SGLang's application.
OPEN_PATHS = frozenset(
    {"/generate", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/health", REPORTS_PATH}
)
HIDDEN = "***"
_FLAGS = ("--api-key", "--admin-api-key")


class KeyMissing(ReefError, ValueError):
    """A key can't be read; the message names the variable, never the key."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Never printed: `repr` leaves the keys out."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    api_variable: str = API_VARIABLE
    admin_variable: str = ADMIN_VARIABLE

    def header(self, path: str) -> str:
        """The header line for a call of `path`, with its end; empty where there is no key for it."""
        key = self.api if path.partition("?")[0] in OPEN_PATHS else self.admin or self.api
        return f"Authorization: Bearer {key}\r\n" if key else ""

    def explained(self, status: int, path: str, answer: bytes) -> bytes:
        """`answer`, or for a refusal for want of a key the reason and the way out."""
        if status not in (401, 403):
            return answer
        sent = "the key that it was sent isn't the engine's" if self.header(path) else "the engine wants a key"
        way = f"set the environment variable {self.api_variable} to its --api-key"
        if path not in OPEN_PATHS:
            way = f"set the environment variable {self.admin_variable} to its --admin-api-key, or else {way[4:]}"
        return f"{sent}: {way}".encode()


def read_keys(
    api_variable: str = "", admin_variable: str = "", environment: Mapping[str, str] | None = None
) -> EngineKeys:
    """The keys in these variables; without a name, in API_VARIABLE and ADMIN_VARIABLE, where they are set.

    Raises KeyMissing for a variable that is named and not set, and for what can't be a key.
    """
    environment = os.environ if environment is None else environment
    found: list[str] = []
    for named, usual in ((api_variable, API_VARIABLE), (admin_variable, ADMIN_VARIABLE)):
        key = environment.get(named or usual, "").strip()
        if named and not key:
            raise KeyMissing(f"the environment variable {named}, which should hold an engine's key, isn't set")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise KeyMissing(f"the environment variable {named or usual} holds no key: use printable ASCII, no spaces")
        found.append(key)
    api, admin = found
    return EngineKeys(api, admin, api_variable or API_VARIABLE, admin_variable or ADMIN_VARIABLE)


def keys_in_flags(flags: Sequence[str], others: EngineKeys) -> EngineKeys:
    """The keys that engines are started with by these flags of sglang.launch_server; `others` where they have none."""
    found = dict.fromkeys(_FLAGS, "")
    for flag, value in zip_longest(flags, flags[1:], fillvalue=""):
        name, given, joined = flag.partition("=")
        if name in found:
            found[name] = joined if given else value
    return EngineKeys(
        found["--api-key"] or others.api,
        found["--admin-api-key"] or others.admin,
        others.api_variable,
        others.admin_variable,
    )


def without_keys(flags: Sequence[str]) -> list[str]:
    """The same flags with HIDDEN in the place of each key, to be written down."""
    hidden: list[str] = []
    for flag in flags:
        name, given, _ = flag.partition("=")
        if hidden and hidden[-1] in _FLAGS:
            hidden.append(HIDDEN)
        else:
            hidden.append(f"{name}={HIDDEN}" if name in _FLAGS and given else flag)
    return hidden
