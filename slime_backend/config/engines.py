"""This section configures a run's engines: how many, on what, started how, and their calls' deadlines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_backend.config.errors import ConfigError
from slime_backend.config.section import Section
from slime_backend.engine_client import Deadlines
from slime_backend.engine_client.keys import EngineKeys, KeyMissing, keys_in_flags, read_keys
from slime_backend.engine_plugin import check_names
from slime_backend.engine_process import RUN_HOOKS
from slime_backend.policy import Policy


class EnginesConfig(Section):
    """Engines are started with these settings, within which the policy decides on the radix cache and the hooks."""

    count: int = Field(2, alias="engines", ge=1, le=64)
    ports: list[int] = Field(default_factory=list, description="one per engine; empty: free ones")
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(1, alias="engine_threads", ge=1)
    max_total_tokens: int = Field(65536, ge=1024, description="KV slots per engine")
    chunked_prefill_size: int = Field(
        2048,
        ge=64,
        description="tokens per prefill step; requests that fit one step after a flush each compute the shared prompt",
    )
    page_size: int = Field(1, ge=1)
    disable_radix_cache: bool | None = Field(None, description="override; refused where it would be unsafe")
    skip_tokenizer: bool = True
    hooks: list[str] = Field(default_factory=lambda: list(RUN_HOOKS))
    flags: list[str] = Field(
        default_factory=list, alias="engine_flags", description="further flags of sglang.launch_server"
    )
    api_key_env: str = Field(
        "", alias="engine_api_key_env", description="the environment variable with the engines' --api-key"
    )
    admin_api_key_env: str = Field("", alias="engine_admin_api_key_env", description="the same for --admin-api-key")
    ready_s: float = Field(300, alias="engine_ready_s", gt=0)
    wait_s: float = Field(
        60, alias="engine_wait_s", gt=0, description="how long a request waits while no engine can take it"
    )
    deadline_pause_s: float = Field(15, gt=0, description="for one engine's pause; also for the proof that it paused")
    deadline_flush_s: float = Field(30, gt=0, description="for the flush after a retract, with its retries")
    deadline_load_s: float = Field(
        600, gt=0, description="for loading one version, and for opening and closing a weight session"
    )
    deadline_control_s: float = Field(10, gt=0, description="for a label, a resume, a report")
    deadline_generate_s: float = Field(3600, gt=0, description="for one request, or for a piece of a stream")

    @model_validator(mode="after")
    def _consistent(self) -> EnginesConfig:
        if self.ports and len(self.ports) != self.count:
            raise ValueError(f"ports lists {len(self.ports)} ports for engines={self.count}; give one per engine")
        if len(set(self.ports)) != len(self.ports):
            raise ValueError("ports names one port twice")
        if self.device.startswith("cuda") and self.device != "cuda":
            raise ValueError(f"device={self.device}: give cuda; each engine gets GPUs of its own")
        if any(flag.partition("=")[0] == "--preferred-sampling-params" for flag in self.flags):
            raise ValueError(
                "engine_flags has --preferred-sampling-params, which changes how rollouts are sampled without the "
                "trainer's knowledge; leave it out and set temperature"
            )
        check_names(self.hooks, "hooks")
        missing = [h for h in ("kv_evidence", "kv_spans") if h not in self.hooks]
        if missing:
            raise ValueError(f"hooks lacks {', '.join(missing)}, without which nothing can be verified or audited")
        return self

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(
            pause=self.deadline_pause_s,
            flush=self.deadline_flush_s,
            load=self.deadline_load_s,
            control=self.deadline_control_s,
            generate=self.deadline_generate_s,
        )

    @property
    def keys_to_send(self) -> EngineKeys:
        """Return the keys that the engines ask for. Raises ConfigError for a variable that isn't set."""
        try:
            read = read_keys(self.api_key_env, self.admin_api_key_env)
        except KeyMissing as error:
            raise ConfigError(str(error)) from error
        return keys_in_flags(self.flags, read)

    def hooks_under(self, policy: Policy) -> tuple[str, ...]:
        """Return `hooks` and those that the policy needs in addition."""
        return tuple(dict.fromkeys([*self.hooks, *policy.needed_hooks]))

    def radix_cache_under(self, policy: Policy) -> bool:
        """Return whether the radix cache is on: a user may turn it off where the policy would share, never on."""
        return policy.radix_cache and not self.disable_radix_cache
