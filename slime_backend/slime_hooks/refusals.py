"""What would be refused at an engine's admission, found in slime's parsed arguments before anything is loaded.

The table is the one that admission uses (fleet/kv_holders.py), asked about the settings that the engines will be
started with: slime's `--sglang-*` flags, `--prefill-num-servers`, and each server group of a `--sglang-config` file
that gets new weights. Engines that somebody else has started are asked at admission alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_backend.fleet.kv_holders import KvHolder, unhandled
from slime_backend.planner.at_start import installed_sglang, why_not_scoped
from slime_backend.planner.slime_args import SGLANG
from slime_backend.policy import Policy, PolicyError

# SGLang's setting for each kind of server that slime starts: one word of a server group, or a flag.
WORKER_TYPES: Mapping[str, Mapping[str, Any]] = {
    "prefill": {"disaggregation_mode": "prefill"},
    "decode": {"disaggregation_mode": "decode"},
    "encoder": {"encoder_only": True},
}
PREFILL_FLAG = "--prefill-num-servers"


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of engines, by SGLang's names, and where each was asked for."""

    settings: Mapping[str, Any]
    places: Mapping[str, str]


def check(args: Any, policy: Policy) -> None:
    """Raise PolicyError for the first setting that admission would refuse, with its flag and the way to allow it."""
    if getattr(args, "rollout_external", False) or getattr(args, "rollout_external_engine_addrs", None):
        return
    _check_scope(policy)
    allow = frozenset(getattr(args, "allow_kv_holder", None) or ())
    for asked in engines(args):
        for holder in unhandled(asked.settings, allow):
            raise PolicyError(
                f"{_where(holder, asked)}: {holder.name}: {holder.why}; leave it out, or add --allow-kv-holder "
                f"{holder.name}, and --reef-save-weights so that an audit can check what it keeps"
            )


def _check_scope(policy: Policy) -> None:
    installed = installed_sglang()
    if policy.after_pause == "sweep" and installed is not None and (why := why_not_scoped(installed)):
        raise PolicyError(
            f"--disjoint-prefix-sharing=scoped: {why}; use --disjoint-prefix-sharing (retract and flush), or engines "
            "of such a release"
        )


def engines(args: Any) -> Iterator[Asked]:
    """The engines that slime will start for these arguments and publish weights to."""
    flags = {key.removeprefix(SGLANG): value for key, value in vars(args).items() if key.startswith(SGLANG)}
    places = {name: _flag(name, value) for name, value in flags.items()}
    file = flags.pop("config", None)
    if file is not None:
        yield from _of_file(Path(file), args, Asked(flags, places))
        return
    if getattr(args, "prefill_num_servers", None):
        place = f"{PREFILL_FLAG} {args.prefill_num_servers}"
        settings = {**flags, **WORKER_TYPES["prefill"]}
        yield Asked(settings, {**places, **dict.fromkeys(WORKER_TYPES["prefill"], place)})
        return
    yield Asked(flags, places)


def _flag(name: str, value: Any) -> str:
    flag = f"--sglang-{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _of_file(file: Path, args: Any, base: Asked) -> Iterator[Asked]:
    """As slime reads it; what slime itself would not accept is left for slime to name."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError):
        return
    models = content.get("sglang") if isinstance(content, Mapping) else None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, Mapping) and _gets_weights(model, args):
            name = f"{file}: model {model.get('name')}"
            groups = model.get("server_groups") or model.get("engine_groups")
            for number, group in enumerate(groups if isinstance(groups, list) else ()):
                if isinstance(group, Mapping):
                    yield _of_group(group, f"{name}, server_groups[{number}]", base)


def _of_group(group: Mapping[str, Any], where: str, base: Asked) -> Asked:
    overrides = dict(group.get("overrides") or {})
    kind = str(group.get("worker_type"))
    own = {name: f"{where}.overrides.{name}" for name in overrides}
    own |= dict.fromkeys(WORKER_TYPES.get(kind, {}), f"{where}: worker_type {kind}")
    settings = {**base.settings, **overrides, **WORKER_TYPES.get(kind, {})}
    return Asked(settings, {**base.places, **own})


def _gets_weights(model: Mapping[str, Any], args: Any) -> bool:
    """slime's own rule: a model of another checkpoint is frozen unless the file says otherwise."""
    if (said := model.get("update_weights")) is not None:
        return bool(said)
    path = model.get("model_path")
    return path is None or path == getattr(args, "hf_checkpoint", path)


def _where(holder: KvHolder, asked: Asked) -> str:
    """The settings without which the holder wouldn't be there, as the user wrote them."""
    found: Collection[str] = [
        place
        for name, place in asked.places.items()
        if not holder.present({key: value for key, value in asked.settings.items() if key != name})
    ]
    return ", ".join(dict.fromkeys(found)) or "these settings together"
