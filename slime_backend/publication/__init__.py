"""The publication transaction. Its idea: policy.py, then transaction.py."""

from slime_backend.publication.transaction import (
    EngineOutcome,
    NotConfirmed,
    PublicationError,
    PublicationReport,
    State,
    pause_generation_for_update,
    publish,
)

__all__ = [
    "EngineOutcome",
    "NotConfirmed",
    "PublicationError",
    "PublicationReport",
    "State",
    "pause_generation_for_update",
    "publish",
]
