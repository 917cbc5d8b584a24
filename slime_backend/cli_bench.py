"""`reef-slime bench`: each prints one table, or one JSON line, and says with its exit code whether every goal holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

from slime_backend import event_loop

bench = typer.Typer(help="Measure ours beside what there is without it.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON line")]


@bench.command()
def swa(as_json: AsJson = False) -> None:
    """Fan-out over a shared prompt on a sliding-window model, with SGLang as it is beside it; some minutes.

    Exit code 1 if a goal isn't met."""
    from slime_backend.bench.swa import bench_swa

    _measure("swa", "sliding-window prefix cache", bench_swa, as_json)


@bench.command()
def overhead(as_json: AsJson = False) -> None:
    """The cost of recording: tokens decoded per second with every hook on, beside the plugin off; a quarter of an hour.

    Exit code 1 if a goal isn't met."""
    from slime_backend.bench.overhead import bench_overhead

    _measure("overhead", "the cost of recording (tokens per second)", bench_overhead, as_json)


def _measure(name: str, title: str, work: Callable[..., Coroutine[Any, Any, None]], as_json: bool) -> None:
    """Run a bench and print its rows. Of one that ends early those that it had: they took minutes to measure."""
    from slime_backend.bench.rows import Row, print_rows, to_json

    def say(text: str) -> None:
        typer.echo(text, err=True)

    rows: list[Row] = []
    early: BaseException | None = None
    try:
        event_loop.run_until_signal(work(say, rows))
    except BaseException as error:
        early = error
        say(f"bench {name} ended early, with {len(rows)} rows measured")
    if as_json:
        why = None if early is None else " ".join(str(early).split()) or "interrupted"
        typer.echo(json.dumps(to_json(name, rows, why)))
    elif rows:
        print_rows(title, rows)
    if early is not None:
        raise early
    if not all(row.holds for row in rows):
        raise typer.Exit(1)
