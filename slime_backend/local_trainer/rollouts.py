"""`RolloutWorker` keeps rollouts in flight while the trainer steps, and returns them in groups.

    submitted.jsonl   one line before each request is sent: its receipt
    rollouts.jsonl    one line for each answer: the rollout with its provenance; the newest part of the ledger
    unusable.jsonl    one line for each answer that is no rollout, with the reason and the answer as it came

so that "every request came back exactly once" can be counted from the files, after a crash too.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_backend.config import TaskConfig
from slime_backend.fleet import Fleet
from slime_backend.fleet.dispatch import RequestQuarantined, generate
from slime_backend.ledger.writer import Ledger
from slime_backend.local_trainer.task import Question, Task, prompt_ids, shared_prompt_length
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.wire import ANCHORS_HOOK, ANCHORS_KEY


@dataclass(slots=True)
class RolloutCounts:
    submitted: int = 0
    completed: int = 0
    unusable: int = 0  # answers that can't be trained on: without provenance, or with log-probs that are no numbers
    resubmitted: int = 0  # attempts that had to be repeated on another engine


class RolloutWorker:
    """The worker generates groups of rollouts without end.

    At most `groups_per_step + groups_ahead` of them are in flight, waiting or being trained on, which bounds how stale
    a rollout can be when it is trained on.

    worker.start()
    groups = await worker.next_groups(8)     # oldest first
    await worker.stop()                      # no new groups; those in flight are finished and recorded
    """

    def __init__(
        self,
        fleet: Fleet,
        config: TaskConfig,
        seed: int,
        task: Task,
        tokenizer: Any,
        run_dir: Path,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.fleet, self.config, self.task, self.tokenizer, self.log = fleet, config, task, tokenizer, log
        self.counts = RolloutCounts()
        self._shared = shared_prompt_length(tokenizer, task)
        self._submitted = JsonlWriter(RunDir(run_dir).submitted)
        self._rollouts = Ledger(run_dir, segment_bytes=int(config.segment_mib * 2**20))
        # A resumed run must not ask the questions of its first part again, so the seed takes in how many there were.
        self._run_dir = run_dir
        self._unusable: JsonlWriter | None = None  # made for the first one
        self._last_unusable = ""
        self._empty = 0  # groups in a row without a usable rollout
        self._asked = _count_lines(self._submitted.path) // config.samples_per_group
        self._questions: Iterator[Question] = task.questions(random.Random(f"{seed}/{self._asked}"))
        self._finished: asyncio.Queue[list[RolloutRecord] | BaseException] = asyncio.Queue()
        self._slots = asyncio.Semaphore(config.groups_per_step + config.groups_ahead)
        self._began: dict[str, str] = {}  # receipt of a request in flight -> the fleet's version when it was sent
        self._stopping = False
        self._groups: set[asyncio.Task[None]] = set()
        self._feeder: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._feeder = asyncio.create_task(self._feed())

    async def next_groups(self, count: int) -> list[list[RolloutRecord]]:
        """Return the usable rollouts of the next `count` finished groups.

        Raises what a rollout raised that can't be completed, and RecordError where as many groups in a row as a step
        takes have no usable one.
        """
        groups: list[list[RolloutRecord]] = []
        while len(groups) < count:
            item = await self._finished.get()
            if isinstance(item, BaseException):
                raise item
            if item:
                self._empty = 0
                groups.append(item)
                continue
            self._empty += 1
            if self._empty >= self.config.groups_per_step:
                raise RecordError(f"no answer of {self._empty} groups can be used; the last: {self._last_unusable}")
            self.release(1)
        return groups

    def versions_in_flight(self) -> set[str]:
        """Return the versions that requests in flight began under; their rollouts name no earlier one."""
        return set(self._began.values())

    def release(self, groups: int) -> None:
        """Free the slots of groups that were trained on or dropped.

        Called before the publication: those that start now are in flight when the engines pause, and go on with the
        new weights.
        """
        for _ in range(groups):
            self._slots.release()

    async def stop(self, deadline_s: float = 120.0) -> None:
        """Start nothing new; let what is in flight finish within the deadline, then cancel the rest."""
        self._stopping = True
        if self._feeder is not None:
            self._feeder.cancel()
        if self._groups:
            _, late = await asyncio.wait(self._groups, timeout=deadline_s)
            for group in late:
                group.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._submitted.close()
        if self._unusable is not None:
            self._unusable.close()
        await asyncio.to_thread(self._rollouts.close)

    async def _feed(self) -> None:
        while not self._stopping:
            await self._slots.acquire()
            question = next(self._questions)
            self._asked += 1
            task = asyncio.create_task(self._run_group(f"g{self._asked:05d}", question))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _run_group(self, group: str, question: Question) -> None:
        ids = prompt_ids(self.tokenizer, self.task, question)
        try:
            async with asyncio.TaskGroup() as requests:
                tasks = [
                    requests.create_task(self._run_one(group, question, ids))
                    for _ in range(self.config.samples_per_group)
                ]
            usable = [record for t in tasks if (record := t.result()) is not None]
            # A single sample of a group has nothing to be compared with.
            await self._finished.put(usable if len(usable) >= min(2, len(tasks)) else [])
        except BaseExceptionGroup as errors:
            await self._finished.put(errors.exceptions[0])

    async def _run_one(self, group: str, question: Question, ids: list[int]) -> RolloutRecord | None:
        """Send one request and record its answer; None where the answer can't be used, which is recorded too."""
        receipt = uuid.uuid4().hex
        submitted_at = time.time()
        self._submitted.append({"receipt": receipt, "group": group, "at": submitted_at})
        self.counts.submitted += 1
        self._began[receipt] = self.fleet.version
        try:
            return await self._finish_one(receipt, submitted_at, group, question, ids)
        finally:
            del self._began[receipt]

    async def _finish_one(
        self, receipt: str, submitted_at: float, group: str, question: Question, ids: list[int]
    ) -> RolloutRecord | None:
        sampling = {
            "temperature": self.config.temperature,
            "max_new_tokens": question.max_tokens,
            "ignore_eos": not self.task.stop_at_end,
            **({"stop_token_ids": [self.tokenizer.eos_token_id]} if self.task.stop_at_end else {}),
            **self._anchors(),
        }
        try:
            answer = await generate(
                self.fleet,
                {"input_ids": ids, "return_logprob": True, "sampling_params": sampling},
                on_retry=self._count_retry,
            )
        except RequestQuarantined as error:
            self._note_unusable(receipt, group, str(error), {})
            return None
        try:
            record = RolloutRecord.from_answer(
                answer.body,
                receipt=receipt,
                group=group,
                engine=answer.engine,
                question=question.text,
                prompt_ids=ids,
                temperature=self.config.temperature,
                reward=0.0,
                submitted_at=submitted_at,
                attempts=answer.attempts,
                sampling=sampling,
            )
        except RecordError as error:
            self._note_unusable(receipt, group, str(error), answer.body)
            return None
        text = self.tokenizer.decode(list(record.output_ids), skip_special_tokens=False)
        record = replace(record, reward=self.task.reward(question, text))
        self._rollouts.append(record)
        self.counts.completed += 1
        return record

    def _note_unusable(self, receipt: str, group: str, why: str, answer: Any) -> None:
        if self._unusable is None:
            self._unusable = JsonlWriter(RunDir(self._run_dir).unusable)
        self._unusable.append({"receipt": receipt, "group": group, "why": why, "answer": answer})
        self.counts.unusable += 1
        self._last_unusable = why
        if self.counts.unusable == 1:
            file = self._unusable.path.name
            self.log(f"an answer can't be used and is left out: {why}; this and further ones are in {file}")

    def _anchors(self) -> dict[str, Any]:
        """Return where other prompts of the task diverge from this one, for engines that keep windows there.

        Only those of hybrid models do.
        """
        if not self._shared or not self.fleet.has_hook(ANCHORS_HOOK):
            return {}
        return {"custom_params": {ANCHORS_KEY: [self._shared]}}

    def _count_retry(self, reason: str) -> None:
        self.counts.resubmitted += 1
        self.log(f"a request is sent again: {reason}")


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
