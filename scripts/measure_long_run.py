"""Memory of what a long run ends with: a run of made publications and rollouts, its summary, audit sample and report.

    python scripts/measure_long_run.py 100000 1000000      publications, rollouts

Makes the files of a run in a temporary directory (some 1.5 GB for the above), then counts and draws them at 10 % and at
100 % of the run, each in a process of its own, and prints how much its resident memory grew from its start. The steps:
`summarise`, the draw of an audit sample of 240, and the report's page without plotly's source.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.simulation.made_rollouts import made, receipt

ENGINES = 2


def publication(number: int) -> dict[str, object]:
    """With what `PublicationReport.to_json` gives, for two engines; one in 250 lost an engine."""
    engines = []
    for engine in range(ENGINES):
        lost = engine == 1 and number % 250 == 249
        times = {f"{step}_ms": 1.0 + (number + engine) % 7 for step in ("pause", "flush", "load", "label", "resume")}
        engines.append(
            {
                "engine": f"engine{engine}",
                **times,
                "paused_ms": 5.0 + number % 11,
                "confirmed": not lost,
                "failed_step": "load" if lost else None,
                "reason": "a full disk" if lost else None,
                "flush_verified": not lost,
                "sweep_verified": False,
                "tokens_swept": 0,
                "in_flight": 9,
                "requests_retracted": 3,
                "tokens_to_prefill_again": 1200,
                "evidence": [{f"count{i}": i for i in range(40)}],
            }
        )
    return {
        "version": f"v{number + 1}",
        "previous_version": f"v{number}",
        "policy": "made",
        "transport": "disk",
        "state": "resumed",
        "started_at": 1.8e9 + 60 * number,
        "prepare_ms": 3.0,
        "wall_ms": 20.0 + number % 13,
        "engines": engines,
    }


def step(number: int) -> dict[str, object]:
    return {
        "step": number + 1,
        "reward_mean": number % 10 / 10,
        "reward_std": 0.1,
        "lag_mean": 1.0,
        "lag_max": 2,
        "staleness": {"train_within_bound": 10},
        "receipts": [receipt(number * 10 + i) for i in range(10)],
    }


def rollout(number: int, per_version: int) -> RolloutRecord:
    """As `made`, of the version that its place in the run gives it."""
    record = made(number)
    version = number // per_version
    names = {s.version: f"v{version + i}" for i, s in enumerate(record.spans)}
    data = json.loads(json.dumps(record.to_json()))

    def rename(value: object) -> object:
        if isinstance(value, dict):
            return {k: names.get(v, v) if k == "version" else rename(v) for k, v in value.items()}
        return [rename(v) for v in value] if isinstance(value, list) else value

    return RolloutRecord.from_json(
        {k: rename(v) if k in ("spans", "segments", "prefills") else v for k, v in data.items()}
    )


def make_run(run_dir: Path, publications: int, rollouts: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    write(run_dir / "publications.jsonl", map(publication, range(publications)))
    write(run_dir / "steps.jsonl", map(step, range(publications)))
    write(run_dir / "submitted.jsonl", ({"receipt": receipt(i), "group": "g", "at": 0.0} for i in range(rollouts)))
    ledger = Ledger(run_dir)
    try:
        for number in range(rollouts):
            ledger.append(rollout(number, max(1, rollouts // publications)))
    finally:
        ledger.close()


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    writer = JsonlWriter(path)
    for row in rows:
        writer.append(row)
    writer.close()


def reset_peak() -> None:
    """From here on (Linux): a child begins with the peak of the process that started it."""
    Path("/proc/self/clear_refs").write_text("5")


def rss_mib() -> float:
    """The most that this process held since."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def end_run(run_dir: Path) -> dict[str, float]:
    """Measure what the ends of this run cost in this process: MiB of growth and seconds, by step."""
    from slime_backend.audit.sampling import Sample
    from slime_backend.ledger.files import read_rollouts
    from slime_backend.report.run_data import read_run
    from slime_backend.report.summary import write_summary
    from slime_backend.report.write import compose

    def draw() -> None:
        sample = Sample(240)
        for row in read_rollouts(run_dir):
            record = RolloutRecord.from_json(row)
            sample.offer(record.receipt, record.crossing)

    found = {}
    reset_peak()
    for name, work in (
        ("summary", lambda: write_summary(run_dir, {})),
        ("sample", draw),
        ("report", lambda: compose(read_run(run_dir), "")),
    ):
        before, started = rss_mib(), time.monotonic()
        work()
        found[f"{name}_mib"] = round(rss_mib() - before, 1)
        found[f"{name}_s"] = round(time.monotonic() - started, 1)
    return {**found, "peak_mib": round(rss_mib(), 1)}


def main() -> None:
    if sys.argv[1] == "--end":
        print(json.dumps(end_run(Path(sys.argv[2]))))
        return
    publications, rollouts = int(sys.argv[1]), int(sys.argv[2])
    for share in (0.1, 1.0):
        with tempfile.TemporaryDirectory(prefix="reef-slime-long-") as folder:
            run_dir = Path(folder) / "run"
            make_run(run_dir, int(publications * share), int(rollouts * share))
            command = [sys.executable, __file__, "--end", str(run_dir)]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(
            f"{int(publications * share):,} publications, {int(rollouts * share):,} rollouts: {found.strip()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
