"""A trainer with slime's loop and nothing to train, as a process that kills itself where it is asked to.

    python -m tests.reef_service.killed_trainer URL SAVE STEPS --interval 2 --asynchronous --kill 1:trained

Its checkpoint holds the receipts of all samples that it was trained on. `--old` takes leases as reef-slime 0.2 did:
named by the last part of --save, acknowledged from memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

from reef_service import slime_rollout
from reef_service.client import BatchClient
from reef_service.slime_job import TRACKER

GROUPS = 2


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.save = options, Path(options.save)
        self.args = types.SimpleNamespace(
            reef_gateway=options.url, rollout_batch_size=GROUPS, n_samples_per_prompt=1, save=options.save,
            load=options.save, reef_asynchronous=options.asynchronous,
        )  # fmt: skip
        self.first, self.trained = 0, []
        if (self.save / TRACKER).is_file():
            step = int((self.save / TRACKER).read_text())
            self.first, self.trained = step + 1, json.loads((self.save / f"{step}.json").read_text())

    def run(self) -> None:
        finish = slime_rollout.at_end(self.args)
        steps, ahead = self.options.steps, None
        if self.options.asynchronous:
            ahead = self.take(self.first)
        for step in range(self.first, steps):
            taken = ahead if self.options.asynchronous else self.take(step)
            if self.options.asynchronous and step + 1 < steps:
                ahead = self.take(step + 1)
            self.trained += taken
            self.reach(step, "trained")
            if (step + 1) % self.options.interval == 0 or step == steps - 1:
                self.write(step)
                self.reach(step, "saved")
        if not self.options.old:
            finish()

    def take(self, step: int) -> list[str]:
        self.asked = step
        function = old_rollout if self.options.old else slime_rollout.generate_rollout
        output = function(self.args, step, None)
        self.reach(step, "taken")
        return [receipt for group in output.samples for s in group for receipt in s.metadata["reef"]["receipts"]]

    def write(self, step: int) -> None:
        self.save.mkdir(parents=True, exist_ok=True)
        for name, text in ((f"{step}.json", json.dumps(self.trained)), (TRACKER, str(step))):
            draft = self.save / f".{name}"
            draft.write_text(text)
            draft.replace(self.save / name)

    def reach(self, step: int, point: str) -> None:
        if self.options.kill == f"{step}:{point}":
            os.kill(os.getpid(), signal.SIGKILL)


_old_leases: dict[int, str] = {}


def old_rollout(args: Any, rollout_id: int, data_source: Any) -> Any:
    """What the rollout function did when a lease's name was kept in memory."""
    client = slime_rollout.make_client(args)
    tracker = Path(args.save) / TRACKER
    safe = int(tracker.read_text()) if tracker.is_file() else -1
    for step in sorted(step for step in _old_leases if step <= safe and step < rollout_id):
        client.ack(_old_leases.pop(step))
    name = f"{Path(args.save).name}-{rollout_id}"
    batch = client.wait(name, lambda found: len(found.samples) == GROUPS, deadline_s=10, limit=GROUPS, lease_s=3600)
    _old_leases[rollout_id] = batch.lease
    return Output(slime_rollout.to_groups(args, batch, rollout_id), {})


@dataclasses.dataclass
class Output:
    samples: list
    metrics: dict


class StandIn:
    """slime.utils.types.Sample with the fields that are written."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def stand_in_for_slime() -> None:
    for name in ("slime", "slime.utils", "slime.rollout", "slime.utils.types", "slime.rollout.base_types"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["slime.utils.types"])["Sample"] = StandIn
    vars(sys.modules["slime.rollout.base_types"])["RolloutFnTrainOutput"] = Output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("save")
    parser.add_argument("steps", type=int)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--kill", default="")
    stand_in_for_slime()
    slime_rollout.WAIT_S = 10.0
    trainer = Trainer(parser.parse_args())
    for call in ("saved", "ack"):  # when it is answered, that of step N - 1 is acknowledged
        plain = getattr(BatchClient, call)

        def noted(self: Any, *args: Any, plain: Any = plain) -> Any:
            answer = plain(self, *args)
            trainer.reach(trainer.asked - 1, "acknowledged")
            return answer

        setattr(BatchClient, call, noted)
    trainer.run()


if __name__ == "__main__":
    main()
