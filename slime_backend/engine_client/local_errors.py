"""What this process or this machine lacks, as distinct from what the other end of a connection did.

    no descriptor (EMFILE, ENFILE), no memory (ENOMEM, ENOBUFS), no free port to connect from (EADDRNOTAVAIL)

asyncio reports the errors of several addresses as one OSError without a number, and getaddrinfo has numbers of its own;
their texts still have the system's.
"""

from __future__ import annotations

import errno
import re

from slime_backend.errors import ReefError

LOCAL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_TEXTS = ("Too many open files", "Cannot allocate memory", "Cannot assign requested address", "No buffer space")


class NoConnection(ReefError, ConnectionError):
    """A connection that was never made: nothing was sent."""


class LocalResourceError(NoConnection):
    """No connection, because this process or machine has no more descriptors, memory or ports: it says nothing of the
    server."""


def is_local(error: OSError) -> bool:
    """Whether a failed connection is this machine's own fault."""
    if error.errno in LOCAL:
        return True
    text = str(error)
    numbers = {int(found) for found in _NUMBER.findall(text)}
    return bool(numbers & LOCAL) or any(known in text for known in _TEXTS)
