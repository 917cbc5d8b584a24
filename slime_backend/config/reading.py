"""`load_config` reads a YAML file and `--set key=value` once, checks them and resolves `auto`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slime_backend.config.engines import EnginesConfig
from slime_backend.config.errors import ConfigError
from slime_backend.config.model import ModelConfig
from slime_backend.config.run import SECTIONS, RunConfig
from slime_backend.config.task import TaskConfig
from slime_backend.planner.at_start import AUTO, StartFacts, info_of_flags, installed_sglang, resolve_sharing
from slime_backend.planner.traffic import Traffic

SHARING = "disjoint_prefix_sharing"
Expected = Callable[[TaskConfig, EnginesConfig, ModelConfig], Traffic]


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    traffic: Expected | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> RunConfig:
    """Read a YAML file and apply `key=value` overrides (values are YAML scalars or lists); the rest is `make_config`.

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
    if isinstance(data.get(SHARING), bool):
        data[SHARING] = "retract" if data[SHARING] else "off"
    return make_config(data, str(path), traffic=traffic, log=log)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`; gateway.port means the key port of the section gateway."""
    section, dot, name = key.partition(".")
    if not dot:
        data[key] = value
    elif isinstance(data.setdefault(section, {}), dict):
        data[section][name] = value
    else:
        raise ConfigError(f"--set {key}={value!r}: {section} isn't a section")


def make_config(
    data: Mapping[str, Any],
    where: str,
    *,
    traffic: Expected | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> RunConfig:
    """Make the configuration of flat keys that were read at `where`.

    `disjoint_prefix_sharing: auto` becomes one of the policy's modes here, which `log` gets with the reason. `traffic`:
    the expected load of the engines; None where it isn't known. Raises ConfigError with one line.
    """
    if data.get(SHARING) != AUTO:
        return _checked(data, where)
    others = _checked({**data, SHARING: "retract"}, where)  # retract is valid wherever another mode is
    sharing, why = resolve_sharing(AUTO, lambda: _facts_of_config(others, traffic))
    log(f"{SHARING}={AUTO} takes {sharing}: {why}")
    return _checked({**data, SHARING: sharing}, where)


def _facts_of_config(config: RunConfig, traffic: Expected | None) -> StartFacts:
    return StartFacts(
        layout=config.publication.layout,
        traffic=traffic(config.task, config.engines, config.model) if traffic else None,
        requests=config.task.groups_per_step * config.task.samples_per_group / config.engines.count,
        sglang=installed_sglang(),
        engine_info=info_of_flags(config.engines.flags),
        disable_radix_cache=config.engines.disable_radix_cache,
    )


def _checked(data: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_fault(error)}") from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    location = fault["loc"][1:] if fault["loc"][:1] and fault["loc"][0] in SECTIONS else fault["loc"]
    key = ".".join(str(part) for part in location)
    message = fault["msg"].removeprefix("Value error, ")
    return f"{key}={fault['input']!r}: {message}" if key else message
