"""One run of the loop on a fake engine, in a process of its own, since DeepSpeed keeps its groups for good:

    python -m tests.local_trainer.deepspeed_loop SETTINGS [resume] [kill]

`kill`: after the first step the other rank is ended with SIGKILL. Prints how many ranks were seen beside this process,
during the run and after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import psutil

from slime_backend.config import make_config
from slime_backend.errors import RunError
from slime_backend.local_trainer import loop
from tests.local_trainer.fake_runs import fake_fleet
from tests.processes import below_with


def ranks() -> list[psutil.Process]:
    return [p for p in below_with("deepspeed_rank") if p not in below_with("deepspeed_rank", "engine_guard")]


def main() -> None:
    config = make_config(json.loads(sys.argv[1]), "test")
    loop.running_fleet = fake_fleet
    loop.report_at_the_end = lambda *args: None
    seen = [0]

    def log(line: str) -> None:
        seen.append(len(ranks()))
        if "kill" in sys.argv and line.startswith("step   1/"):
            for process in ranks():
                os.kill(process.pid, signal.SIGKILL)

    work = loop.train(config, config.run_dir, resume="resume" in sys.argv, reporter=loop.Reporter(log=log))
    try:
        asyncio.run(asyncio.wait_for(work, 300))
    except RunError as error:
        print(f"RunError: {error}")
    print(f"ranks: {max(seen)}, {len(ranks())}")


if __name__ == "__main__":
    main()
