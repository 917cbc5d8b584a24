"""The deadlines of calls to an engine, and the typed errors that a failed call raises."""

from __future__ import annotations

from dataclasses import dataclass

from slime_backend.engine_client.local_errors import LocalResourceError, NoConnection
from slime_backend.errors import EngineFault

BUSY_STATUSES = frozenset({408, 425, 429})  # request timeout, too early, too many requests: nobody's fault


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each kind of call may take."""

    pause: float = 15.0  # an abort pause polls once a second until the running requests are gone
    flush: float = 30.0  # includes the retries while an overlapped batch drains
    load: float = 600.0  # also the begin and the end of a weight session, which may process all weights
    control: float = 10.0  # label, resume, evidence
    generate: float = 3600.0


class EngineError(EngineFault, RuntimeError):
    """A call to an engine failed. `took_effect` is False, or None when that can't be known."""

    took_effect: bool | None = None

    def __init__(self, engine: str, call: str, seen: str, *, status: int | None = None) -> None:
        super().__init__(engine, seen, status, doing=call)
        self.call = call


class EngineUnreachable(EngineError):
    """No connection, or it broke. A request that was already sent may have taken effect.

    `reached`: whether it may have been; False where there was no connection to send it on.
    """

    reached = True


class EngineTimeout(EngineError):
    """No answer within the deadline. The request may have taken effect, or may yet."""


class EngineUncalled(EngineError):
    """This process has no descriptor, memory or port left for a connection: the engine was not asked, and nothing is
    known of it."""

    took_effect = False


class EngineRefused(EngineError):
    """The engine answered and refused.

    `status` is the HTTP status, None for a refusal inside an answer 200. `retry_after_s` is what the header Retry-After
    asks for, where it is given in seconds.
    """

    took_effect = False

    def __init__(
        self, engine: str, call: str, seen: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(engine, call, seen, status=status)
        self.retry_after_s = retry_after_s

    @property
    def for_now(self) -> bool:
        """Whether the engine refuses at this moment (overloaded, starting, stopping), not this request."""
        return self.status is not None and (self.status >= 500 or self.status in BUSY_STATUSES)

    @property
    def own_fault(self) -> bool:
        """Whether the request itself is wrong, so that no engine would take it."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in BUSY_STATUSES


class EngineProtocolError(EngineError):
    """The engine answered something that isn't the wire contract."""


def no_answer(engine: str, call: str, error: ConnectionError) -> EngineUncalled | EngineUnreachable:
    """What a connection's failure says of the engine."""
    if isinstance(error, LocalResourceError):
        return EngineUncalled(engine, call, str(error))
    unreachable = EngineUnreachable(engine, call, str(error))
    unreachable.reached = not isinstance(error, NoConnection)
    return unreachable


def refused(engine: str, call: str, status: int, content: bytes | str, retry_after: str = "") -> EngineRefused:
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    seconds = float(retry_after) if retry_after.strip().isdecimal() else None  # a date is of no use without its clock
    return EngineRefused(engine, call, f"HTTP {status}: {one_line(text)}", status=status, retry_after_s=seconds)


def one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
