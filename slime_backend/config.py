"""The one configuration object of a run: a YAML file, then `--set key=value`; read once and passed down."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slime_backend.engine_client import Deadlines
from slime_backend.engine_keys import EngineKeys, KeyMissing, keys_in_flags, read_keys, without_keys
from slime_backend.engine_plugin import check_names
from slime_backend.engine_process import RUN_HOOKS
from slime_backend.errors import UsageError
from slime_backend.policy import AskedSharing, Layout, Policy, PolicyError, decide
from slime_backend.provenance.staleness import StalenessPolicy


class ConfigError(UsageError, ValueError):
    """The configuration can't be used; one line says which key, what was seen and what is possible."""


class RunConfig(BaseModel):
    """Everything a run can be told. Keys bear the names of the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names runs/<name>")
    runs_dir: str = Field("runs", description="where runs/<name>/ is made")
    model: str = Field("tiny", description="tiny, tiny_hybrid, smollm2, or a directory with a checkpoint")
    models_dir: str = Field("models", description="where models that are made on the spot are kept")
    seed: int = Field(0, ge=0)

    layout: Layout = "disjoint"
    disjoint_prefix_sharing: AskedSharing = "off"
    transport: Literal["disk", "distributed"] = "disk"

    engines: int = Field(2, ge=1, le=64)
    ports: list[int] = Field(default_factory=list, description="one per engine; empty: free ones")
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    engine_threads: int = Field(1, ge=1)
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
    engine_flags: list[str] = Field(default_factory=list, description="further flags of sglang.launch_server")
    engine_api_key_env: str = Field("", description="the environment variable with the engines' --api-key")
    engine_admin_api_key_env: str = Field("", description="the same for --admin-api-key")
    engine_ready_s: float = Field(300, gt=0)
    engine_wait_s: float = Field(60, gt=0, description="how long a request waits while no engine can take it")
    deadline_pause_s: float = Field(15, gt=0, description="of one engine's pause; also of the proof that it took it")
    deadline_flush_s: float = Field(30, gt=0, description="of the flush after a retract, with its retries")
    deadline_load_s: float = Field(600, gt=0, description="of loading one version, and of a weight session's ends")
    deadline_control_s: float = Field(10, gt=0, description="of a label, a resume, a report")
    deadline_generate_s: float = Field(3600, gt=0, description="of one request, or of a piece of a stream")

    task: Literal["character_kinds", "bare_sums"] = "character_kinds"
    steps: int = Field(16, ge=1)
    groups_per_step: int = Field(9, ge=1)
    samples_per_group: int = Field(8, ge=2)
    groups_ahead: int = Field(9, ge=0, description="groups that may be generated beyond the batch being trained")
    temperature: float = Field(
        1.0, ge=1e-6, allow_inf_nan=False, description="under 1e-6 is greedy: nothing to train on"
    )
    learning_rate: float = Field(1e-2, gt=0)
    ratio_bound: float = Field(2.0, ge=1)
    staleness: StalenessPolicy = Field("correct", description="what happens to tokens over max_version_lag")
    max_version_lag: int | None = Field(None, ge=0, description="publications between sampling and training; none: any")
    ratio_low: float = Field(0.5, ge=0, le=1, description="staleness=correct masks a token whose ratio is under this")
    ratio_high: float = Field(5.0, ge=1, description="or over this")
    trainer: Literal["torch", "deepspeed"] = Field(
        "torch", description="deepspeed: pip install 'reef-slime[deepspeed]'"
    )
    zero_stage: Literal[1, 2, 3] = Field(2, description="of trainer=deepspeed: what its processes share out")
    trainer_processes: int = Field(
        1, ge=1, le=64, description="of trainer=deepspeed; each trains on its share of a batch"
    )
    trainer_threads: int = Field(1, ge=1, description="of each process")
    trainer_device: str | None = Field(
        None,
        pattern=r"^(cpu|cuda|cuda:[0-9]+)$",
        description="of trainer=torch; none: a GPU of its own behind the engines' with device=cuda, else the CPU",
    )

    rollouts_segment_mib: float = Field(16, gt=0, description="of rollouts.jsonl, before it becomes a Parquet segment")
    keep_versions: int | None = Field(
        None, ge=2, description="checkpoints of older versions are removed once nothing needs them; none: all are kept"
    )
    audit_rollouts: int = Field(240, ge=0, description="rollouts to audit; 0: none")
    audit_tolerance: float = Field(1e-4, gt=0)
    audit_beside: bool = Field(False, description="audit in a process beside the training instead of at the end")
    audit_deadline_s: float = Field(600, gt=0, description="of audit_beside: how long it may go on after the run's end")
    tracker: Literal["wandb", "tensorboard", "none"] = Field("wandb", description="where metrics go")
    wandb: Literal["offline", "online", "disabled"] = "offline"
    wandb_project: str = "reef-slime"
    wandb_artifacts: bool = Field(False, description="at the end, weight versions and rollouts as W&B artifacts")

    gateway: dict[str, Any] | None = Field(None, description="of `serve` and `up`; checked by reef_service.config")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.ports and len(self.ports) != self.engines:
            raise ValueError(f"ports lists {len(self.ports)} ports for engines={self.engines}; give one per engine")
        if len(set(self.ports)) != len(self.ports):
            raise ValueError("ports names one port twice")
        if self.staleness != "correct" and self.max_version_lag is None:
            raise ValueError(f"staleness={self.staleness} does nothing without a bound; give max_version_lag as well")
        if self.trainer_processes > 1 and self.trainer != "deepspeed":
            raise ValueError(
                f"trainer_processes={self.trainer_processes} needs trainer=deepspeed; trainer={self.trainer} has one"
            )
        if self.device.startswith("cuda") and self.device != "cuda":
            raise ValueError(f"device={self.device}: give cuda; each engine is given GPUs of its own")
        if self.trainer == "deepspeed" and (self.trainer_device or "cpu") != "cpu":
            raise ValueError(f"trainer_device={self.trainer_device}: trainer=deepspeed trains on the CPU; leave it out")
        if any(flag.partition("=")[0] == "--preferred-sampling-params" for flag in self.engine_flags):
            raise ValueError(
                "engine_flags has --preferred-sampling-params, which changes how rollouts are sampled behind the "
                "trainer's back; leave it out and set temperature"
            )
        # Raises PolicyError, a ValueError. What auto is resolved to is checked then; scoped asks the least.
        policy = decide(self.layout, "scoped") if self.disjoint_prefix_sharing == "auto" else self.policy
        if self.layout == "colocated":
            raise ValueError(
                "layout=colocated needs a trainer that shares GPUs with the engines (slime); "
                "the local trainer is disjoint"
            )
        if self.disable_radix_cache is False:
            from slime_backend.policy import check_radix_setting

            check_radix_setting(policy, True, "disable_radix_cache=false")
        check_names(self.hooks, "hooks")
        missing = [h for h in ("kv_evidence", "kv_spans") if h not in self.hooks]
        if missing:
            raise ValueError(f"hooks lacks {', '.join(missing)}, without which nothing can be verified or audited")
        return self

    @property
    def policy(self) -> Policy:
        """Raises PolicyError while the sharing is `auto`: local_trainer/auto_sharing.py resolves it first."""
        return decide(self.layout, self.disjoint_prefix_sharing)  # type: ignore[arg-type]

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
    def engine_keys(self) -> EngineKeys:
        """Of the engines, wherever they were started. Raises ConfigError for a variable that isn't set."""
        try:
            read = read_keys(self.engine_api_key_env, self.engine_admin_api_key_env)
        except KeyMissing as error:
            raise ConfigError(str(error)) from error
        return keys_in_flags(self.engine_flags, read)

    def to_record(self) -> dict[str, Any]:
        """What may be written down: without keys of engines."""
        return {**self.model_dump(), "engine_flags": without_keys(self.engine_flags)}

    @property
    def engine_hooks(self) -> tuple[str, ...]:
        """`hooks` and what the policy needs besides."""
        return tuple(dict.fromkeys([*self.hooks, *self.policy.needed_hooks]))

    @property
    def radix_cache(self) -> bool:
        return self.policy.radix_cache and not self.disable_radix_cache

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply `key=value` overrides (values are YAML scalars or lists).

    Raises ConfigError with one line.
    """
    if not path.is_file():
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml"))) or "none in configs/"
        raise ConfigError(f"no config file {path}; there are {known}")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r}: give it as key=value")
        try:
            found = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override!r}: the value isn't valid YAML") from error
        _put(data, key.strip().replace("-", "_"), found)
    # YAML reads a bare off/on as a boolean; here it is a mode's name.
    if isinstance(data.get("disjoint_prefix_sharing"), bool):
        data["disjoint_prefix_sharing"] = "retract" if data["disjoint_prefix_sharing"] else "off"
    return make_config(data, str(path))


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`; gateway.port means the key port of the section gateway."""
    section, dot, name = key.partition(".")
    if not dot:
        data[key] = value
    elif isinstance(data.setdefault(section, {}), dict):
        data[section][name] = value
    else:
        raise ConfigError(f"--set {key}={value!r}: {section} isn't a section")


def make_config(data: dict[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig(**data)
    except PolicyError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_fault(error)}") from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, RunConfig.model_fields, n=1)
        return f"unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    message = fault["msg"].removeprefix("Value error, ")
    return f"{key}={fault['input']!r}: {message}" if key else message
