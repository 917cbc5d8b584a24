"""How many connections fit into this process: every connection, to a client or to an engine, is a file descriptor.

    limit of the process = used already + RESERVE + calls to engines + a burst of connections + clients' connections

The calls to engines come first: without a descriptor for one, a healthy engine can't be asked. What is left is for the
clients, and more of them are turned away (connections.py). The system's default of 1024 is raised at start.
"""

from __future__ import annotations

import os
import resource

from reef_service.config import GatewayConfig
from slime_backend.config import ConfigError

WANTED = 65_536
RESERVE = 64  # the store, logs, files that are read
PER_ENGINE = 8  # calls other than requests: looks, aborts, a publication
BACKLOG = 256  # connections that the system may hand over before the first of them can be turned away
ASSUMED_USED = 64  # where the system doesn't report it


def raise_limit(wanted: int = WANTED) -> int:
    """Raise this process's soft limit of descriptors as far as `wanted` and the hard limit allow; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < goal:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
        soft = goal
    return WANTED if soft == resource.RLIM_INFINITY else soft


def connections_that_fit(config: GatewayConfig, engines: int) -> int:
    """Clients' connections that this process may hold. Raises ConfigError where the configuration's requests don't fit:
    each that is answered or waits holds one."""
    limit = raise_limit()
    taken = used() + RESERVE + config.max_concurrent + PER_ENGINE * max(1, engines) + BACKLOG
    fits, needed = limit - taken, config.max_concurrent + config.max_waiting
    if config.max_connections is not None:
        needed = max(needed, config.max_connections)
        fits = min(fits, config.max_connections) if fits >= needed else fits
    if fits < needed:
        raise ConfigError(
            f"gateway.max_concurrent={config.max_concurrent} and gateway.max_waiting={config.max_waiting} need "
            f"{taken + needed} file descriptors, and this process may have {limit}; raise the hard limit "
            "(ulimit -Hn), or lower them"
            if config.max_connections is None
            else f"gateway.max_connections={config.max_connections}, max_concurrent={config.max_concurrent} and "
            f"max_waiting={config.max_waiting} need {taken + needed} file descriptors, and this process may have "
            f"{limit}; raise the hard limit (ulimit -Hn), or lower them"
        )
    return fits


def used() -> int:
    """Descriptors that are open now."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return ASSUMED_USED
