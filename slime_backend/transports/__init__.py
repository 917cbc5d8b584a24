"""How bytes reach an engine. A transport moves weights; it never pauses, flushes, labels or resumes."""

from slime_backend.transports.base import (
    Refused,
    Transport,
    TransportError,
    digests_of,
    expect_digests,
    expect_loads,
    is_counted,
    refused_by,
)
from slime_backend.transports.disk import CheckpointTransport, DiskTransport

__all__ = [
    "CheckpointTransport",
    "DiskTransport",
    "Refused",
    "Transport",
    "TransportError",
    "digests_of",
    "expect_digests",
    "expect_loads",
    "is_counted",
    "refused_by",
]
