"""`reef-slime`: train, up, serve, audit, rollouts, report, publish, doctor, plan, bench.

Exit codes: 0 done, 1 something failed (or an audit found a violation), 2 the command or its configuration is wrong,
130 interrupted. Every failure is one line on standard error. Heavy imports happen inside the commands, after
what can be checked without them: one file a command, and audit_run.py and gateway.py, which are imported when needed.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from slime_backend import __version__
from slime_backend.cli import audit, engines, rollouts, serve, train
from slime_backend.cli.bench import bench
from slime_backend.cli.plan import plan
from slime_backend.errors import ReefError

app = typer.Typer(
    name="reef-slime",
    help="Publish new weights to live SGLang rollout engines without poisoning the rollouts, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(train.train)
app.command()(train.up)
app.command()(serve.serve)
app.command("export")(serve.export_turns)
app.command()(audit.audit)
app.command()(rollouts.rollouts)
app.command()(rollouts.report)
app.command()(engines.publish)
app.command()(engines.doctor)
app.command()(plan)
app.add_typer(bench, name="bench")


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
    # Other libraries' progress output would break our progress bars.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Run the console script: every error becomes one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("reef-slime: interrupted; what was recorded so far is complete", err=True)
        sys.exit(130)
    except ReefError as error:
        _exit(error, error.exit_code)
    except (OSError, FloatingPointError) as error:  # a disk's error, a training that diverged
        _exit(error, 1)


def _exit(error: BaseException, code: int) -> None:
    typer.echo(f"reef-slime: {' '.join(str(error).split()) or type(error).__name__}", err=True)
    sys.exit(code)
