"""The table of docs/slime/compatibility.md: slime version x SGLang version x path, from runs that were made.

    python scripts/slime_runs.py run PATH -- COMMAND...     run it and note the outcome in docs/slime/runs.jsonl
    python scripts/slime_runs.py render                     write the table again
    python scripts/slime_runs.py check                      exit code 1 where the page isn't what `render` would write

PATH is one of PATHS below. `run` ends with the command's own exit code; SLIME_SRC names the slime that it uses. A cell
shows the newest run, its date and its command; a cell without a run is marked.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime_backend.slime_hooks.contract.symbols import make_contract

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs" / "slime" / "runs.jsonl"
PAGE = ROOT / "docs" / "slime" / "compatibility.md"
BEGIN, END = "<!-- table: scripts/slime_runs.py render -->", "<!-- end of table -->"

PATHS = {
    "distributed": "`train.py`, weights by broadcast",
    "distributed-tp2": "the same, trainer over TP 2",
    "distributed-dp2": "the same, trainer over DP 2",
    "tensor": "`train.py --colocate`, weights as tensors",
    "tensor-extra-engine": "the same, with one engine more on GPUs of its own",
    "disk-full": "`train.py --update-weight-transport disk`",
    "disk-delta": "`train.py --update-weight-mode delta`",
    "external-engine": "`train.py --rollout-external-engine-addrs`",
    "async": "`train_async.py`",
    "fully-async": "`train_async.py`, fully asynchronous rollouts, two engines",
    "server-groups": "`--sglang-config` with several server groups",
    "frozen-model": "`--sglang-config` with a frozen second model",
    "fault-tolerance": "`--use-fault-tolerance`, an engine killed in rollout 2",
    "fault-tolerance-rejected": "the same, an engine that refuses publication 2 is replaced",
    "rejected-update": "an engine that refuses the weights",
    "prefix-sharing": "`--disjoint-prefix-sharing`: groups share their prompt, audit of the whole run",
    "rollouts": "spans in samples, ledger, staleness, metrics in slime's W&B run",
    "launch-scripts": "flags of `scripts/slime_*.sh` by slime's own parser",
    "gpu": "any path on GPUs",
}
# (slime, SGLang): the columns that the table always has.
VERSIONS = [("0.3.1", "0.5.23"), ("0.3.1", "0.5.15.post1")]


def run(path: str, command: list[str]) -> int:
    """Run `command` and append what it showed to RUNS."""
    source = os.environ.get("SLIME_SRC")
    if not source:
        sys.exit("slime_runs: SLIME_SRC names no slime checkout")
    started = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    row = {
        "path": path,
        "slime": make_contract(Path(source), {})["slime_version"],
        "sglang": importlib.metadata.version("sglang"),
        "date": datetime.date.today().isoformat(),
        "passed": code == 0,
        "seconds": round(time.monotonic() - started),
        "command": shlex.join(command),
    }
    with RUNS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return code


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. Of several runs of a cell the last in the file counts."""
    newest = {(row["path"], row["slime"], row["sglang"]): row for row in rows}
    versions = [*VERSIONS, *sorted({(r["slime"], r["sglang"]) for r in rows} - set(VERSIONS))]
    header = ["path", *(f"slime {slime}, SGLang {sglang}" for slime, sglang in versions)]
    lines = [header, ["---"] * len(header)]
    for path, words in PATHS.items():
        lines.append([words, *(_cell(newest.get((path, *version))) for version in versions)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    verdict = "passed" if row["passed"] else "**failed**"
    command = row["command"].replace("|", "\\|")
    return f"{verdict} {row['date']}, {row['seconds']} s: `{command}`"


def page(rows: list[dict[str, Any]]) -> str:
    """The page with its table replaced."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    runner = actions.add_parser("run")
    runner.add_argument("path", choices=PATHS, metavar="PATH")
    runner.add_argument("command", nargs="+", metavar="COMMAND")
    actions.add_parser("render")
    actions.add_parser("check")
    options = parser.parse_args()
    if options.action == "run":
        return run(options.path, options.command)
    wanted = page(read())
    if options.action == "check":
        same = PAGE.read_text() == wanted
        sys.stdout.write("" if same else f"{PAGE.name} is not what its runs say; python scripts/slime_runs.py render\n")
        return 0 if same else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
