"""Runs functions in several processes that meet in a gloo group on the loopback."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
MEET_S = 120


def run_ranks(function: str, ranks: int, folder: Path, **settings: Any) -> list[Any]:
    """`run_cases` with one case: what each rank returned."""
    return run_cases(function, ranks, folder, [settings])[0]


def run_cases(function: str, ranks: int, folder: Path, cases: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Call `module:function(rank, folder / "<case's number>", **case)` for every case, one after another, in each of
    `ranks` processes; returns what each rank returned, by case. Importing takes most of the time, so cases share it.

    Cases and results are JSON. AssertionError with what a process printed where it fails; all are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    processes, logs = [], []
    try:
        for rank in range(ranks):
            logs.append(folder / f"rank{rank}.log")
            call = json.dumps([function, rank, ranks, str(folder), list(cases)])
            with logs[-1].open("wb") as log:
                command = [sys.executable, "-m", "tests.weight_sources.ranks", call]
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env={**environment, "LOCAL_RANK": str(rank)},
                    )
                )
        until = time.monotonic() + DEADLINE_S
        while any(p.poll() is None for p in processes):
            failed = any(p.poll() not in (None, 0) for p in processes)
            assert time.monotonic() < until, f"{function} took more than {DEADLINE_S:g} s"
            if failed:
                time.sleep(1.0)  # the others say why they fail too
                break
            time.sleep(0.05)
        texts = [log.read_text(errors="replace") for log in logs]
        assert all(p.poll() == 0 for p in processes), "\n".join(text[-4000:] for text in texts)
        by_rank = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(ranks)]
        return [list(of_case) for of_case in zip(*by_rank, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def main() -> None:
    function, rank, ranks, folder, cases = json.loads(sys.argv[1])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=MEET_S))
    results = []
    for number, case in enumerate(cases):
        directory = Path(folder) / str(number)
        directory.mkdir(exist_ok=True)
        results.append(call(rank, directory, **case))
        dist.barrier()
    (Path(folder) / f"result{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
