"""`reef-slime plan` predicts what each mode costs a traffic, and recommends one."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from slime_backend.planner.plan import Given, make_plan
from slime_backend.planner.traffic import PlanError

Page = Annotated[Path | None, typer.Option(metavar="FILE.html", help="write the plots: one file, no network")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON line")]


def plan(page: Page = None, as_json: AsJson = False, **given: Any) -> None:
    """Predict prefilled tokens, throughput and lag under each way to publish, and recommend one.

    The traffic comes from RUN_DIR, from --bench, or from flags; the speeds from flags, --model-billions, or the same
    place. Formulas and what they leave out: docs/planner.md."""
    settings = Given(**given)
    if settings.run_dir is not None and not settings.run_dir.is_dir():
        raise PlanError(f"no run directory {settings.run_dir}")
    found = make_plan(settings)
    if page is not None:
        from slime_backend.planner.page import write_page

        write_page(found, page)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    _print(found)
    if page is not None:
        typer.echo(f"plots: {page}")


def _with_flags_of_given(command: inspect.Signature) -> inspect.Signature:
    """Return the signature that Typer reads: a parameter for each field of Given in the place of **given."""
    hints = get_type_hints(Given, include_extras=True)
    asked = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_option(hints[f.name]))
        for f in dataclasses.fields(Given)
    ]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in command.parameters.values() if p.kind is not p.VAR_KEYWORD]
    return command.replace(parameters=[*asked, *own])


def _option(hint: Any) -> Any:
    kind, flag = get_args(hint)
    if flag.positional:
        return Annotated[kind, typer.Argument(metavar=flag.metavar, help=flag.help)]
    names = [] if flag.name is None else [flag.name]
    return Annotated[kind, typer.Option(*names, metavar=flag.metavar, help=flag.help)]


plan.__signature__ = _with_flags_of_given(inspect.signature(plan, eval_str=True))  # type: ignore[attr-defined]


def _comparison_table(cells: Any) -> Any:
    from rich.table import Table

    table = Table(title="predictions and measurements", title_justify="left")
    for name in ("publication every", "mode", "figure"):
        table.add_column(name)
    for name in ("measured", "predicted", "off by"):
        table.add_column(name, justify="right")
    for c in cells:
        figures = (f"{c.measured:.3g}", f"{c.predicted:.3g}", f"{c.off_by:.0%}{'' if c.close else ' !'}")
        table.add_row(f"{c.interval_s:g} s", c.mode, c.figure, *figures)
    return table


def _print(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found.format_traffic(), title_justify="left")
    table.add_column("mode")
    for name in ("tokens/s", "prefilled per token", "prefilled/s", "lag", "mixed", "paused", "answer"):
        table.add_column(name, justify="right")
    for p in found.predictions.values():
        table.add_row(
            p.mode,
            f"{p.tokens_per_s:.0f}",
            f"{p.prefilled_per_token:.2f}",
            f"{p.prefilled_per_s:.0f}",
            f"{p.lag:.2f}",
            f"{p.mixed_share:.0%}",
            f"{p.standstill_share:.1%}",
            f"{p.answer:.0f}",
        )
    console = Console(highlight=False)
    console.print(table)
    if found.compared:
        console.print(_comparison_table(found.compared))
    for line in found.lines():
        console.print(line)
