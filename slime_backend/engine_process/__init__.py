"""SGLang servers started by this machine, and the guard that ends each with its controller."""

from slime_backend.engine_process.engine import (
    DEFAULT_HOOKS,
    ORIGINAL_LOGPROB,
    RUN_HOOKS,
    EngineSettings,
    EngineStartError,
    LocalEngine,
    PortOccupiedError,
    check_port,
    free_port,
    running_engines,
)

__all__ = [
    "DEFAULT_HOOKS",
    "ORIGINAL_LOGPROB",
    "RUN_HOOKS",
    "EngineSettings",
    "EngineStartError",
    "LocalEngine",
    "PortOccupiedError",
    "check_port",
    "free_port",
    "running_engines",
]
