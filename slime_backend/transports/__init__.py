"""How bytes reach an engine. A transport moves weights; it never pauses, flushes, labels or resumes."""

from slime_backend.transports.base import Transport, TransportError
from slime_backend.transports.disk import CheckpointTransport, DiskTransport

__all__ = ["CheckpointTransport", "DiskTransport", "Transport", "TransportError"]
