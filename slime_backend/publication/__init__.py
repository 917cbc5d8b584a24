"""The publication transaction. Read ../policy.py, then transaction.py."""

from slime_backend.publication.pause import PausedEngines, pause_generation_for_update
from slime_backend.publication.report import (
    EngineOutcome,
    NotConfirmed,
    PublicationError,
    PublicationReport,
    State,
    Step,
    pause_to_verified_ms,
    times_of,
)
from slime_backend.publication.transaction import Publication, publish

__all__ = [
    "EngineOutcome",
    "NotConfirmed",
    "PausedEngines",
    "Publication",
    "PublicationError",
    "PublicationReport",
    "State",
    "Step",
    "pause_generation_for_update",
    "pause_to_verified_ms",
    "publish",
    "times_of",
]
