"""The `gateway:` section of a configuration, checked here and read once."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slime_backend.config import ConfigError


class GatewayConfig(BaseModel):
    """The section holds every setting of a gateway; the engines' policy is in the configuration around it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8700, ge=0, le=65535, description="0: any free port")
    engines: list[str] = Field(default_factory=list, description="base URLs, for `serve`; `up` starts its own")
    store: str = Field("", description="database address; empty: sqlite in the run directory")
    model_name: str = Field("", description="what clients see; empty: the model's directory")

    allowed_hosts: list[str] = Field(default_factory=list, description="names it is reached by, without tokens")

    agent_token_file: Path | None = Field(None, description="a file whose first line agents must show")
    admin_token_file: Path | None = Field(None, description="the same for trainers and publishers")

    max_concurrent: int = Field(256, ge=1, description="requests on the engines at once")
    max_waiting: int = Field(1024, ge=0, description="requests that may wait at the gate")
    max_connections: int | None = Field(None, ge=1, description="clients' connections; empty: as many as fit")
    head_s: float = Field(15.0, gt=0, description="how long a request's headers may take to come")
    body_s: float = Field(120.0, gt=0, description="how long its body may take")
    idle_s: float = Field(75.0, gt=0, description="how long a connection may wait for its next request")
    hold_s: float = Field(30.0, gt=0, description="how long a request waits there before 503")
    max_body_mib: float = Field(16, gt=0)
    max_prompt_tokens: int = Field(131072, ge=1)
    max_output_tokens: int = Field(32768, ge=1)
    context_length: int | None = Field(None, ge=2, description="empty: the model's own")
    sessions_in_memory: int = Field(10_000, ge=1, description="older ones are read from the store again")
    tokens_in_memory: int = Field(4_000_000, ge=1, description="of the last turns of sessions")
    lease_s: float = Field(600.0, gt=0, description="how long a trainer may keep samples without acknowledging")
    quarantine_s: float = Field(
        600.0, ge=0, description="how long a request that an engine ended during is known again"
    )
    keep_trained_s: float | None = Field(None, ge=0, description="how long a session is kept after its training")
    keep_gib: float | None = Field(None, gt=0, description="of turns; above it sessions go that were trained on")
    watch_s: float = Field(2.0, gt=0, description="between two looks at the engines")

    @model_validator(mode="after")
    def _safe(self) -> GatewayConfig:
        if len(set(self.engines)) != len(self.engines):
            raise ValueError("engines names one engine twice")
        if not is_loopback(self.host) and (self.agent_token_file is None or self.admin_token_file is None):
            raise ValueError(
                f"host={self.host} is reachable from other machines; give agent_token_file and admin_token_file, or "
                "use 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def gateway_config(section: Mapping[str, object] | None, where: str) -> GatewayConfig:
    """Raises ConfigError with one line."""
    try:
        return GatewayConfig.model_validate(section or {})
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, GatewayConfig.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}: gateway: unknown key {key!r}{hint}") from error
        message = fault["msg"].removeprefix("Value error, ")
        line = f"gateway.{key}={fault['input']!r}: {message}" if key else f"gateway: {message}"
        raise ConfigError(f"{where}: {line}") from error
