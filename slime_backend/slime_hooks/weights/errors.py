"""What a publication raises in slime's processes. Plain messages, so that they cross Ray's process borders whole."""

from __future__ import annotations

from slime_backend.errors import ReefError
from slime_backend.publication import PublicationError


class PublicationFailed(ReefError, RuntimeError):
    """No engine reached the new version; the message names each engine, the step and what it answered."""


class EngineRejectedUpdate(PublicationFailed):
    """Every engine was paused and verified, and none took the weights."""


def from_publication(error: PublicationError) -> PublicationFailed:
    """The error of a transaction as one of the above."""
    steps = {outcome.failed_step for outcome in error.report.engines if not outcome.confirmed}
    kind = EngineRejectedUpdate if steps == {"load"} else PublicationFailed
    named = "; ".join(f"{engine}: {why}" for engine, why in error.report.unconfirmed.items())
    return kind(f"publication of version {error.report.version} reached no engine: {named or 'there is none'}")


def shareable(error: PublicationFailed) -> tuple[str, str]:
    """For another rank, which makes the same error of it with `rebuilt`."""
    return type(error).__name__, str(error)


def rebuilt(shared: tuple[str, str]) -> PublicationFailed:
    name, message = shared
    return EngineRejectedUpdate(message) if name == EngineRejectedUpdate.__name__ else PublicationFailed(message)
