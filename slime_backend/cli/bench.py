"""`reef-slime bench` measures; each bench prints a table or a JSON line and exits with 1 if a goal isn't met."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from slime_backend import event_loop
from slime_backend.bench.catalog import BENCHES, Bench

bench = typer.Typer(help="Measure ours against what there is without it.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON line")]
Folder = Annotated[
    Path | None, typer.Option("--write", metavar="DIR", help="write the page of the bench, with plots, into DIR")
]
Part = Annotated[str | None, typer.Option("--part", metavar="PART", help="measure one part only")]


def _add(entry: Bench) -> None:
    parts = f" Parts: {', '.join(entry.parts)}." if entry.parts else ""

    @bench.command(entry.name, help=f"{entry.summary}{parts}\n\nExit code 1 if a goal isn't met.")
    def command(as_json: AsJson = False, folder: Folder = None, part: Part = None) -> None:
        if part is not None and part not in entry.parts:
            known = f"its parts are {', '.join(entry.parts)}" if entry.parts else "it has no parts"
            raise typer.BadParameter(f"{part!r} is not a part of bench {entry.name}; {known}", param_hint="--part")
        if not _measure(entry, part, as_json, folder):
            raise typer.Exit(1)


for _entry in BENCHES:
    _add(_entry)


@bench.command("all")
def everything(as_json: AsJson = False, folder: Folder = None) -> None:
    """Run every bench, one after the other; takes an hour and a half. With --json, print a line for each.

    One that ends early doesn't keep the others from running. Exit code 1 if a goal isn't met, or if one ended early."""
    done = [_unless_it_fails(partial(_measure, entry, None, as_json, folder)) for entry in BENCHES]
    if not all(done):
        raise typer.Exit(1)


def _unless_it_fails(work: Callable[[], bool]) -> bool:
    """Return False where it raises anything but an interrupt: `all` logs the error and goes on."""
    try:
        return work()
    except Exception as error:
        _log(f"reef-slime: {' '.join(str(error).split())}")
        return False


def _measure(entry: Bench, part: str | None, as_json: bool, folder: Path | None) -> bool:
    """Run a bench, print its rows, write its page; return whether every goal holds.

    Where it ends early, the rows measured so far are printed, because they took minutes, and nothing is written: a page
    has complete runs only.
    """
    from slime_backend.bench import pages, plots
    from slime_backend.bench.rows import Row, print_rows, to_json

    if folder is not None:
        pages.prepare(folder, entry)  # an unusable folder is refused now, not after minutes
    rows: list[Row] = []
    early: BaseException | None = None
    clock = pages.Clock()
    try:
        details = event_loop.run_until_signal(entry.run(_log, rows, part))
    except BaseException as error:
        early = error
        _log(f"bench {entry.name} ended early, with {len(rows)} rows measured")
    if as_json:
        why = None if early is None else " ".join(str(early).split()) or "interrupted"
        typer.echo(json.dumps(to_json(entry.name, rows, why)))
    elif rows:
        print_rows(entry.title, rows)
    if early is not None:
        raise early
    if folder is not None:
        page = pages.write(folder, entry, clock.run(entry, part, rows, details))
        _log(f"wrote {page}" + ("" if plots.can_draw() else " without plots (pip install 'reef-slime[bench]')"))
    return all(row.holds for row in rows)


def _log(text: str) -> None:
    typer.echo(text, err=True)
