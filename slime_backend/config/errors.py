"""This module has the error for a configuration that can't be used."""

from __future__ import annotations

from slime_backend.errors import UsageError


class ConfigError(UsageError, ValueError):
    """The configuration can't be used; one line names the key, what was seen and what is possible."""
