"""This lists the benches: each is an `async def bench_x(log, rows)` that appends a row as soon as it has it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench is a module whose docstring goes to the bench's page, with the plots that its `PLOTS` describe.

    `parts`: what can be measured separately, with `bench_x(log, rows, parts)`.
    """

    name: str
    title: str
    summary: str  # of the command: what is measured, and how long it takes
    parts: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        return importlib.import_module(f"slime_backend.bench.{self.name}")

    def description(self) -> str:
        return inspect.getdoc(self.module) or ""

    def run(self, log: Log, rows: list[Any], part: str | None = None) -> Coroutine[Any, Any, Any]:
        """Run all of it, or one part. Returns further JSON to keep with the rows; most benches have none."""
        work = getattr(self.module, f"bench_{self.name}")
        return work(log, rows) if part is None else work(log, rows, (part,))


# In the order in which `all` runs them: cheap ones first.
BENCHES = (
    Bench(
        "fleet",
        "the barrier over a thousand engines",
        "What pausing, verifying and resuming costs over 1 to 1024 fake engines; with a slow, dead or hung one among "
        "them; some five minutes.",
        ("growth", "faults", "clients"),
    ),
    Bench(
        "attention",
        "attention on a CPU",
        "Prefix hits, batched decode and prefill with our CPU attention, compared with SGLang's own; some minutes.",
        ("hits", "decode", "prefill", "alone"),
    ),
    Bench(
        "publish",
        "how long a publication pauses the engines",
        "Pause to resumed without the bytes, by load and by engines, compared with slime's sequence; some ten minutes.",
        ("load", "engines", "eight"),
    ),
    Bench(
        "swa",
        "sliding-window prefix cache",
        "Fan-out over a shared prompt on a sliding-window model, compared with SGLang as it is; some minutes.",
        ("wide", "roomy", "tight"),
    ),
    Bench(
        "overhead",
        "the cost of recording (tokens per second)",
        "The cost of recording: tokens decoded per second with every hook on, compared with the same engine with its "
        "hooks out; a quarter of an hour.",
        ("hybrid", "dense"),
    ),
    Bench(
        "modes",
        "the same traffic under each way to publish",
        "Asynchronous traffic under slime's abort (dropped or requeued), retract, no sharing, and scoped; half an "
        "hour.",
        ("every-4-s", "every-6-s", "every-12-s"),
    ),
)
