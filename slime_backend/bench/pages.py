"""This writes the page of a bench: its rows as a table and plots, with the command, the machine and the date.

    folder/README.md          the index
    folder/<bench>.json       what was measured, run by run; everything else is made of these
    folder/<bench>.md         the page
    folder/<bench>-<plot>.svg

A run of one part replaces the earlier run of that part, a complete run all of them. Rows that miss their goal stay in.
`python -m slime_backend.bench.pages DIR` makes all but the data files again, without measuring.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_backend.bench import plots
from slime_backend.bench.catalog import BENCHES, Bench
from slime_backend.bench.rows import COLUMNS, BenchError, Row, cells, row_json

PACKAGES = ("reef-slime", "sglang", "torch")

INDEX = """# Benchmarks

Each page is written by its bench, from what it measured on the machine that it names:

```
reef-slime bench NAME --write docs/benchmarks
```

The peer and ours run in the same run and in turns, warmed up; a figure is the median, in brackets the middle half of
the rounds. "times better" is the ratio of the costs (or of the speeds). Rows that missed their goal stay in. What it
means at other sizes: [scale.md](scale.md).

| bench | what | goals met | measured |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The figures depend on this machine. It names neither the host nor a path."""

    cores: int  # available to this process
    memory_gib: float
    processor: str
    kernel: str
    python: str
    packages: dict[str, str]

    @classmethod
    def this(cls) -> Machine:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return cls(
            len(os.sched_getaffinity(0)),
            round(memory, 1),
            _processor(),
            platform.release(),
            platform.python_version(),
            {name: version for name in PACKAGES if (version := _version(name))},
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gib:g} GiB, Linux {self.kernel}, "
            f"Python {self.python}, {versions}"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """This records one run of a bench, or of one part of it."""

    command: str
    date: str
    machine: Machine
    seconds: float
    rows: Sequence[Row]
    part: str | None = None
    load: tuple[float, float] | None = None  # the machine's one-minute average at the run's beginning and end
    details: dict[str, Any] | None = None  # what a bench keeps in addition to its rows, for others to read

    def to_json(self) -> dict[str, Any]:
        data = {**asdict(self), "rows": [row_json(row) for row in self.rows]}
        return {name: value for name, value in data.items() if name != "details" or value is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        machine, rows = Machine(**data["machine"]), [Row(**row) for row in data["rows"]]
        load = None if data["load"] is None else tuple(data["load"])
        return cls(**{**data, "machine": machine, "load": load, "rows": rows})


class Clock:
    """The clock starts with a run and measures its time and the machine's load."""

    def __init__(self) -> None:
        self._started, self._load = time.monotonic(), os.getloadavg()[0]

    def run(self, bench: Bench, part: str | None, rows: Sequence[Row], details: dict[str, Any] | None = None) -> Run:
        command = f"reef-slime bench {bench.name}" + (f" --part {part}" if part else "")
        load = round(self._load, 1), round(os.getloadavg()[0], 1)
        seconds = round(time.monotonic() - self._started, 1)
        return Run(command, time.strftime("%Y-%m-%d"), Machine.this(), seconds, rows, part, load, details)


def write(folder: Path, bench: Bench, run: Run) -> Path:
    """Add `run` to the bench's file and make its page, its plots and the index again; returns the page.

    Plots need matplotlib (`plots.can_draw`); without it the page has none. Raises BenchError where the folder holds
    something else, OSError where it can't be written.
    """
    prepare(folder, bench)
    runs = [] if run.part is None else [old for old in read(folder, bench) if old.part not in (None, run.part)]
    runs = sorted([*runs, run], key=lambda r: bench.parts.index(r.part) if r.part in bench.parts else 0)
    data = {"bench": bench.name, "runs": [r.to_json() for r in runs]}
    _data_file(folder, bench).write_text(json.dumps(data, indent=1) + "\n")
    page = _write_page(folder, bench, runs)
    (folder / "README.md").write_text(index(folder))
    return page


def prepare(folder: Path, bench: Bench) -> None:
    """Make the folder, before minutes are spent on what goes into it. Raises BenchError where it can't be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(
            f"{folder} can't be written to ({error.strerror}); choose another folder for --write"
        ) from error
    read(folder, bench)


def rewrite(folder: Path) -> None:
    """Make every page, plot and the index again from the data files."""
    for bench in BENCHES:
        if runs := read(folder, bench):
            _write_page(folder, bench, runs)
    (folder / "README.md").write_text(index(folder))


def _write_page(folder: Path, bench: Bench, runs: Sequence[Run]) -> Path:
    page = folder / f"{bench.name}.md"
    page.write_text(compose(bench, runs, _draw(folder, bench, runs)))
    return page


def read(folder: Path, bench: Bench) -> list[Run]:
    """Return the runs that are kept there, if any. Raises BenchError for a file that isn't the bench's."""
    path = _data_file(folder, bench)
    try:
        return [Run.from_json(run) for run in json.loads(path.read_text())["runs"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{path}: not what `reef-slime bench {bench.name} --write` writes ({type(error).__name__}: {error}); "
            "remove it or choose another folder"
        ) from error


def compose(bench: Bench, runs: Sequence[Run], pictures: Sequence[tuple[plots.Plot, str]]) -> str:
    """Return the text of a page. `pictures`: plots with the names of their files."""
    blocks = [f"# {bench.title[0].upper()}{bench.title[1:]}", bench.description()]
    blocks += [f"![{plot.title}]({name})" for plot, name in pictures]
    for run in runs:
        table = [_line(COLUMNS), _line("---:" if c in COLUMNS[1:4] else "---" for c in COLUMNS)]
        table += [_line(cells(row)) for row in run.rows]
        facts = f"`{run.command}`, {run.date}, {run.seconds:.0f} s; {run.machine}"
        if run.load is not None:
            facts += f"; load average {run.load[0]:g} as it began, {run.load[1]:g} as it ended"
        blocks += [*([f"## {run.part}"] if run.part else []), "\n".join(table), facts + "."]
    return "\n\n".join(blocks) + "\n"


def index(folder: Path) -> str:
    """Return the index of the benches that have a file in `folder`."""
    lines = []
    for bench in BENCHES:
        if runs := read(folder, bench):
            rows = [row for run in runs for row in run.rows if row.goal != "-"]
            met = f"{sum(row.holds for row in rows)} of {len(rows)}"
            lines.append(_line((f"[{bench.name}]({bench.name}.md)", bench.title, met, max(run.date for run in runs))))
    return INDEX + "".join(line + "\n" for line in lines)


def _draw(folder: Path, bench: Bench, runs: Sequence[Run]) -> list[tuple[plots.Plot, str]]:
    for old in folder.glob(f"{bench.name}-*.svg"):
        old.unlink()
    if not plots.can_draw():
        return []
    rows = [row for run in runs for row in run.rows]
    wanted = [(plot, f"{bench.name}-{plot.name}.svg") for plot in getattr(bench.module, "PLOTS", ())]
    return [(plot, name) for plot, name in wanted if plots.draw(plot, rows, folder / name)]


def _data_file(folder: Path, bench: Bench) -> Path:
    return folder / f"{bench.name}.json"


def _line(texts: Any) -> str:
    return "| " + " | ".join(str(text).replace("|", "\\|") for text in texts) + " |"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
