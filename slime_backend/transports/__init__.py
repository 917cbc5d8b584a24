"""How bytes reach an engine. A transport moves weights; it never pauses, flushes, labels or resumes."""

from slime_backend.transports.base import Transport, TransportError
from slime_backend.transports.disk import DiskTransport

__all__ = ["DiskTransport", "Transport", "TransportError"]
