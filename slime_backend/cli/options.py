"""This has the options that several commands share, and the functions that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from slime_backend.config import ConfigError, RunConfig, load_config
from slime_backend.engine_client.keys import EngineKeys, KeyMissing, read_keys
from slime_backend.fleet.kv_holders import NAMES as HOLDER_NAMES
from slime_backend.fleet.weights import VerifyWeights

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, e.g. configs/cpu_tiny.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a config key")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON line")]
Engines = Annotated[list[str], typer.Option("--engine", metavar="URL", help="an engine's base URL; repeat for more")]
Sharing = Annotated[str, typer.Option("--disjoint-prefix-sharing", metavar="MODE", help="off, retract or scoped")]
VerifyWeightsOption = Annotated[
    str,
    typer.Option("--verify-weights", metavar="MODE", help="engines' weights by content: auto, full, sample or off"),
]
Layout = Annotated[str, typer.Option("--layout", help="disjoint or colocated")]
DeadlineS = Annotated[float, typer.Option(min=0.1, metavar="S", help="as the key of that name; see docs/runs.md")]
ApiKeyEnv = Annotated[
    str,
    typer.Option(
        "--api-key-env", metavar="NAME", help="the variable with the engines' --api-key; REEF_SLIME_ENGINE_API_KEY"
    ),
]
AdminKeyEnv = Annotated[
    str, typer.Option("--admin-api-key-env", metavar="NAME", help="likewise; REEF_SLIME_ENGINE_ADMIN_API_KEY")
]
Allow = Annotated[list[str] | None, typer.Option("--allow-kv-holder", metavar="NAME", help="see docs/kv-holders.md")]


def read_keys_of(api_variable: str, admin_variable: str) -> EngineKeys:
    try:
        return read_keys(api_variable, admin_variable)
    except KeyMissing as error:
        raise ConfigError(str(error)) from error


def weights_mode(word: str) -> VerifyWeights:
    known = get_args(VerifyWeights)
    if word not in known:
        raise ConfigError(f"--verify-weights {word} is unknown; there are {', '.join(known)}")
    return word  # type: ignore[return-value]


def holders(names: list[str] | None) -> frozenset[str]:
    unknown = sorted(set(names or ()) - set(HOLDER_NAMES))
    if unknown:
        raise ConfigError(f"--allow-kv-holder {', '.join(unknown)} is unknown; there are {', '.join(HOLDER_NAMES)}")
    return frozenset(names or ())


def load_settings(path: Path, overrides: list[str] | None, *, trains: bool = False) -> RunConfig:
    """Load a config for a command. `trains`: the engines will serve the config's task."""
    from slime_backend.local_trainer.expected_traffic import expected_traffic

    traffic = expected_traffic if trains else None
    settings = load_config(path, overrides or (), traffic=traffic, log=lambda text: typer.echo(text, err=True))
    if not settings.policy.safe:
        typer.echo(
            "warning: disjoint_prefix_sharing=unsafe shares KV that it can't scope; it exists to show that the audit "
            "finds the damage",
            err=True,
        )
    return settings


def fail(message: str, code: int = 1) -> None:
    typer.echo(f"reef-slime: {message}", err=True)
    raise typer.Exit(code)
