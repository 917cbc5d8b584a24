"""`reef-slime plan`: what each way to publish would cost a traffic, which one to take, and from where on another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def plan(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="[RUN_DIR]", help="a recorded run; flags go before what it says")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="speeds and traffic of reef-slime bench modes --write DIR")
    ] = None,
    prompt: Annotated[float | None, typer.Option("--prompt-tokens", metavar="N", help="of a prompt")] = None,
    shared: Annotated[
        float | None, typer.Option("--shared-tokens", metavar="N", help="of it, what all prompts begin with")
    ] = None,
    group: Annotated[float | None, typer.Option("--group-size", metavar="N", help="requests of one prompt")] = None,
    answer: Annotated[float | None, typer.Option("--answer-tokens", metavar="N", help="mean of an answer")] = None,
    spread: Annotated[float, typer.Option("--answer-spread", help="its standard deviation over its mean")] = 0.6,
    in_flight: Annotated[float | None, typer.Option("--in-flight", metavar="N", help="requests on one engine")] = None,
    per_hour: Annotated[float | None, typer.Option("--publications-per-hour", metavar="N")] = None,
    chunk: Annotated[float | None, typer.Option("--chunk", metavar="N", help="tokens of a prefill step")] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="a group's requests don't reach the engine at once")
    ] = False,
    prefill: Annotated[float | None, typer.Option("--prefill-speed", help="tokens per second of one engine")] = None,
    decode: Annotated[float | None, typer.Option("--decode-speed", help="the same, with all in flight")] = None,
    standstill: Annotated[
        float | None, typer.Option("--standstill", metavar="S", help="seconds a publication in place takes")
    ] = None,
    model: Annotated[float | None, typer.Option("--model-billions", help="active parameters, for the speeds")] = None,
    tflops: Annotated[float, typer.Option(help="of the engine's GPUs together, for --model-billions")] = 989.0,
    bandwidth: Annotated[float, typer.Option("--bandwidth-gb-s", help="the same; both default to one H100")] = 3350.0,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="write the plots: one file, no network")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Predict prefilled tokens, throughput and lag under each way to publish, and recommend one.

    The traffic comes from RUN_DIR, from --bench, or from flags; the speeds from flags, --model-billions, or the same
    place. Formulas and what they leave out: docs/planner.md."""
    from slime_backend.planner.plan import Given, make_plan
    from slime_backend.planner.traffic import PlanError

    if run_dir is not None and not run_dir.is_dir():
        raise PlanError(f"no run directory {run_dir}")
    found = make_plan(
        Given(
            run_dir=run_dir,
            bench=bench,
            prompt=prompt,
            shared=shared,
            group=group,
            answer=answer,
            spread=spread,
            in_flight=in_flight,
            per_hour=per_hour,
            chunk=chunk,
            one_by_one=one_by_one,
            prefill=prefill,
            decode=decode,
            standstill=standstill,
            model_billions=model,
            tflops=tflops,
            gb_s=bandwidth,
        )
    )
    if page is not None:
        from slime_backend.planner.page import write_page

        write_page(found, page)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    _print(found)
    if page is not None:
        typer.echo(f"plots: {page}")


def _compared(cells: Any) -> Any:
    from rich.table import Table

    table = Table(title="predictions beside measurements", title_justify="left")
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

    table = Table(title=found.told_traffic(), title_justify="left")
    table.add_column("mode")
    for name in ("tokens/s", "prefilled per token", "prefilled/s", "lag", "mixed", "stands still", "answer"):
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
        console.print(_compared(found.compared))
    for line in found.lines():
        console.print(line)
