"""`reef-slime`: train, up, serve, audit, rollouts, report, publish, doctor, plan, bench.

Exit codes: 0 done, 1 something failed (or an audit found a violation), 2 the command or its configuration is wrong,
130 interrupted. Every failure is one line on standard error. Heavy imports happen inside the commands,
after what can be checked without them.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_backend import __version__, event_loop
from slime_backend.cli.bench import bench
from slime_backend.cli.plan import plan
from slime_backend.config import ConfigError, RunConfig, load_config
from slime_backend.errors import ReefError
from slime_backend.fleet.kv_holders import NAMES as HOLDER_NAMES
from slime_backend.policy import decide
from slime_backend.run_files import RunDir

app = typer.Typer(
    name="reef-slime",
    help="Publish new weights to live SGLang rollout engines without poisoning the rollouts, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bench, name="bench")
app.command("plan")(plan)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, e.g. configs/cpu_tiny.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a config key")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON line")]


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Third parties' progress chatter would tear our own bars.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="go on with this run")] = None,
    max_version_lag: Annotated[
        int | None, typer.Option(metavar="N", help="publications that may lie between sampling and training")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(metavar="POLICY", help="beyond that: drop, mask_tokens or correct (default)")
    ] = None,
) -> None:
    """Asynchronous GRPO on this machine: a local trainer, live engines, a publication at every step, an audit."""
    flags = {"max_version_lag": max_version_lag, "staleness": staleness}
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    settings = _load(config, [*(overrides or ()), *given], trains=True)
    from slime_backend.cli.console import console_reporter, print_summary
    from slime_backend.local_trainer.loop import choose_run_dir
    from slime_backend.local_trainer.loop import train as run

    run_dir = choose_run_dir(settings.run_dir, resume)
    with console_reporter() as reporter:
        reporter.say(f"run directory: {run_dir}")
        summary = event_loop.run_until_signal(run(settings, run_dir, resume=resume is not None, reporter=reporter))
    print_summary(summary, run_dir)
    audit = summary["audit"]
    if audit and audit["violations"]:
        _fail(
            f"the audit found {audit['violations']} violations in {audit['rollouts']} rollouts; "
            f"{RunDir(run_dir).audit} names them"
        )


@app.command()
def up(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Start the engines of a config, and the gateway if it has a section `gateway`; keep them until interrupted."""
    settings = _load(config, overrides)
    if settings.gateway is not None:
        _gateway_module().up(settings, str(config), as_json)
        return
    from slime_backend.local_trainer.local_fleet import serve_engines
    from slime_backend.local_trainer.loop import base_model

    def ready(urls: list[str]) -> None:
        if as_json:
            typer.echo(json.dumps({"engines": urls, "policy": str(settings.policy), "weight_version": "v0"}))
        else:
            typer.echo("ready: " + " ".join(urls) + "  (Ctrl-C stops them)")
        sys.stdout.flush()

    say = (lambda text: None) if as_json else typer.echo
    event_loop.run_until_signal(
        serve_engines(settings.engines, settings.policy, base_model(settings.model), say=say, ready=ready)
    )


@app.command()
def serve(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """The gateway in front of running engines (gateway.engines); keeps until interrupted. See docs/gateway.md."""
    settings = _load(config, overrides)
    _gateway_module().serve(settings, str(config), as_json)


@app.command("export")
def export_turns(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a gateway's run directory, e.g. runs/gateway")],
    store: Annotated[str | None, typer.Option(metavar="URL", help="default: sqlite in the run directory")] = None,
) -> None:
    """Write a gateway's turns as the ledger of its run directory, which audit, rollouts and report read."""
    typer.echo(_gateway_module().export(run_dir, store))


def _gateway_module() -> Any:
    """`slime_backend.cli.gateway`; one line where what it needs isn't installed."""
    try:
        return importlib.import_module("slime_backend.cli.gateway")
    except ModuleNotFoundError as error:
        _fail(f"the gateway needs {error.name}, which is not installed: pip install 'reef-slime[service]'")


@app.command()
def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
    rollouts: Annotated[int | None, typer.Option(min=1, help="how many to check; default: all")] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="largest |difference of log-prob| that passes")] = 1e-4,
    one_in: Annotated[
        int, typer.Option(min=1, metavar="N", help="the contamination, one rollout in N, that it must be able to find")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="beside a run that goes on: until it ends")] = False,
    idle: Annotated[float, typer.Option(min=0, metavar="S", help="of --follow: end after S s without a rollout")] = 600,
    deadline: Annotated[
        float, typer.Option(min=0, metavar="S", help="of --follow: end S s after the run, checked or not")
    ] = 600,
    plan: Annotated[bool, typer.Option("--plan", help="only say how many rollouts must be checked, and stop")] = False,
    probability: Annotated[float, typer.Option(metavar="P", help="of --plan: the chance to find a fault")] = 0.99,
    as_json: AsJson = False,
) -> None:
    """Recompute rollouts' log-probs under the versions that they claim, and name each violation.

    Exit code 1 unless the verdict is clean."""
    if not run_dir.is_dir():
        _fail(f"no run directory {run_dir}", code=2)
    if plan:
        from slime_backend.cli.rollouts import print_plan

        if not 0 < probability < 1:
            _fail(f"--probability {probability:g} must lie between 0 and 1; certainty means checking all", code=2)
        print_plan(run_dir, probability, as_json)
        return
    from slime_backend.cli.audit import audit_command

    if not audit_command(
        run_dir,
        rollouts=rollouts,
        tolerance=tolerance,
        one_in=one_in,
        follow_until=(idle, deadline) if follow else None,
        as_json=as_json,
    ):
        raise typer.Exit(1)


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
    receipt: Annotated[str | None, typer.Option(help="a receipt, or how it begins; one rollout is drawn")] = None,
    session: Annotated[str | None, typer.Option(help="a session; in the local trainer a group, e.g. g00012")] = None,
    version: Annotated[str | None, typer.Option(help="a version that sampled some of its tokens")] = None,
    rollout_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="pure, recomputed, mixed or carried")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="how many to show; default 20, as JSON all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line per rollout, with tokens")] = False,
) -> None:
    """Look up rollouts in the ledger of a run, also while it is running. Exit code 1 if none matches."""
    from slime_backend.cli.rollouts import show_rollouts
    from slime_backend.ledger.index import Query
    from slime_backend.provenance.classes import CLASSES

    if not run_dir.is_dir():
        _fail(f"no run directory {run_dir}", code=2)
    if rollout_class is not None and rollout_class not in CLASSES:
        _fail(f"--class {rollout_class} is unknown; there are {', '.join(CLASSES)}", code=2)
    if not show_rollouts(run_dir, Query(receipt, session, version, rollout_class), limit, as_json):
        _fail(f"no rollout in {run_dir} matches")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run directory, e.g. runs/demo")],
) -> None:
    """Write RUN_DIR/report.html, a run to look at, and print its path. Reads only the files of the run."""
    from slime_backend.report.write import write_report

    if not run_dir.is_dir():
        _fail(f"no run directory {run_dir}", code=2)
    typer.echo(write_report(run_dir))


Engines = Annotated[list[str], typer.Option("--engine", metavar="URL", help="an engine's base URL; repeat for more")]
Sharing = Annotated[str, typer.Option("--disjoint-prefix-sharing", metavar="MODE", help="off, retract or scoped")]
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


@app.command()
def publish(
    checkpoint: Annotated[Path, typer.Option(help="a Hugging Face checkpoint that the engines can read")],
    version: Annotated[str, typer.Option(help="the name of the new weights")],
    engine: Engines,
    sharing: Sharing = "retract",
    layout: Layout = "disjoint",
    allow: Allow = None,
    deadline_pause_s: DeadlineS = 15.0,
    deadline_flush_s: DeadlineS = 30.0,
    deadline_load_s: DeadlineS = 600.0,
    deadline_control_s: DeadlineS = 10.0,
    compare: Annotated[
        bool, typer.Option(help="with the names, shapes and dtypes of the model that the engines were started with")
    ] = True,
    finite: Annotated[bool, typer.Option("--check-finite/--no-check-finite", help="read all of it for NaN")] = True,
    api_key_env: ApiKeyEnv = "",
    admin_api_key_env: AdminKeyEnv = "",
    as_json: AsJson = False,
) -> None:
    """One verified publication to running engines. Exit code 1 if any engine isn't confirmed at the new version."""
    from slime_backend.cli.engines import print_report, publish_checkpoint
    from slime_backend.engine_client import Deadlines

    policy = decide(layout, sharing)  # type: ignore[arg-type]
    deadlines = Deadlines(deadline_pause_s, deadline_flush_s, deadline_load_s, deadline_control_s)
    report = event_loop.run_until_signal(
        publish_checkpoint(
            policy,
            engine,
            checkpoint,
            version,
            _holders(allow),
            deadlines,
            compare=compare,
            finite=finite,
            keys=_keys(api_key_env, admin_api_key_env),
        )
    )
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        print_report(report)
    if report.unconfirmed:
        raise typer.Exit(1)


@app.command()
def doctor(
    engine: Engines,
    sharing: Sharing = "retract",
    layout: Layout = "disjoint",
    allow: Allow = None,
    api_key_env: ApiKeyEnv = "",
    admin_api_key_env: AdminKeyEnv = "",
    as_json: AsJson = False,
) -> None:
    """Try pause, flush, scope and label on running SGLang servers; exit code 1 if the policy isn't safe on one."""
    from slime_backend.cli.engines import examine, print_diagnosis

    policy = decide(layout, sharing)  # type: ignore[arg-type]
    diagnoses = event_loop.run_until_signal(examine(engine, _holders(allow), _keys(api_key_env, admin_api_key_env)))
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "policy": str(policy),
                    "engines": [
                        {
                            "engine": d.engine,
                            "unsafe": d.unsafe_for(policy),
                            "findings": [asdict(f) for f in d.findings],
                        }
                        for d in diagnoses
                    ],
                }
            )
        )
    else:
        for diagnosis in diagnoses:
            print_diagnosis(diagnosis, policy)
    if any(d.unsafe_for(policy) for d in diagnoses):
        raise typer.Exit(1)


def _keys(api_variable: str, admin_variable: str) -> Any:
    from slime_backend.engine_client.keys import KeyMissing, read_keys

    try:
        return read_keys(api_variable, admin_variable)
    except KeyMissing as error:
        raise ConfigError(str(error)) from error


def _holders(names: list[str] | None) -> frozenset[str]:
    unknown = sorted(set(names or ()) - set(HOLDER_NAMES))
    if unknown:
        raise ConfigError(f"--allow-kv-holder {', '.join(unknown)} is unknown; there are {', '.join(HOLDER_NAMES)}")
    return frozenset(names or ())


def _load(path: Path, overrides: list[str] | None, *, trains: bool = False) -> RunConfig:
    """`trains`: the engines will serve the config's task."""
    from slime_backend.local_trainer.expected_traffic import expected_traffic

    traffic = expected_traffic if trains else None
    settings = load_config(path, overrides or (), traffic=traffic, say=lambda text: typer.echo(text, err=True))
    if not settings.policy.safe:
        typer.echo(
            "warning: disjoint_prefix_sharing=unsafe shares KV that it can't scope; it exists to show that the audit "
            "finds the damage",
            err=True,
        )
    return settings


def _fail(message: str, code: int = 1) -> None:
    typer.echo(f"reef-slime: {message}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """Console script."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("reef-slime: interrupted; what was recorded so far is complete", err=True)
        sys.exit(130)
    except ReefError as error:
        _exit(error, error.exit_code)
    except (OSError, FloatingPointError) as error:  # of the disk, of a training that diverged: Python's own classes
        _exit(error, 1)


def _exit(error: BaseException, code: int) -> None:
    typer.echo(f"reef-slime: {' '.join(str(error).split()) or type(error).__name__}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
