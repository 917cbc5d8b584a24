"""`trainer: deepspeed` partitions the model over processes by ZeRO.

    controller = rank 0                         rank 1, 2, ...  (python -m slime_backend.local_trainer.deepspeed_rank)
    step, save_state, close    ->  command  ->  the same, together
    source.save, a transport   ->  bucket   ->  source.follow()

Between two commands the other ranks follow the source (weight_sources/gathered.py). They run under the same guard as
the engines (engine_process/guard.py): they can't outlive the controller, however that ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from slime_backend.config import TrainerConfig
from slime_backend.engine_process import guard as engine_guard
from slime_backend.errors import RunError
from slime_backend.local_trainer.checkpoint import save_trainer_state, version_name
from slime_backend.local_trainer.deepspeed_step import deepspeed, deepspeed_step, make_deepspeed_engine
from slime_backend.local_trainer.grpo import GrpoConfig, Sample
from slime_backend.run_files import RunDir
from slime_backend.simulation import models
from slime_backend.tracking.columns import StepMetrics
from slime_backend.weight_sources.deepspeed_zero import DeepSpeedZeroSource
from slime_backend.weight_sources.gathered import STAND_BY_S

HOST = "127.0.0.1"
COLLECTIVE_S = 600.0  # one collective operation, once all ranks are at work
START_S = 300.0  # importing torch, transformers and DeepSpeed takes a while while engines start
CLOSE_S = 60.0
POLL_S = 0.1
NOTICE_S = 2.0  # the guard sees the end of a rank a little later than its peers do

Groups = Sequence[Sequence[Sample]]


class RankSettings(BaseModel):
    """A rank is started with these settings."""

    rank: int
    ranks: int
    port: int  # the store's, where the ranks meet
    weights: str
    template: str
    states: str
    resumed_step: int | None
    zero_stage: int
    threads: int
    seed: int
    grpo: dict[str, Any]


class TrainerRank:
    """A rank has its part of the model in DeepSpeed's engine, and a source that publishes it."""

    def __init__(self, settings: RankSettings, store: dist.Store) -> None:
        """Join the other ranks. Raises RunError without DeepSpeed, or without the checkpoint to go on from."""
        self.settings, self.grpo = settings, GrpoConfig(**settings.grpo)
        deepspeed("cpu")  # before anybody waits for this rank
        os.environ["LOCAL_RANK"] = str(settings.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        timeout = timedelta(seconds=COLLECTIVE_S)
        store.set(f"rank{settings.rank}", "here")
        dist.init_process_group("gloo", store=store, rank=settings.rank, world_size=settings.ranks, timeout=timeout)
        # Rollouts are generated between two commands.
        self.commands: Any = dist.new_group(timeout=timedelta(seconds=STAND_BY_S), backend="gloo")
        model = models.load_model(settings.weights)
        self.engine = make_deepspeed_engine(model, self.grpo, settings.zero_stage)
        self.states = Path(settings.states)
        if settings.resumed_step is not None:
            tag = version_name(settings.resumed_step)
            found, _ = self.engine.load_checkpoint(str(self.states), tag=tag)
            if found is None:
                raise RunError(f"{self.states / tag} holds no checkpoint of DeepSpeed to go on from")
        self.source = DeepSpeedZeroSource(self.engine, Path(settings.template), model=model)

    def step(self, groups: Groups) -> StepMetrics:
        return deepspeed_step(self.engine, groups, self.grpo)

    def save_state(self, step: int) -> None:
        self.engine.save_checkpoint(str(self.states), tag=version_name(step))

    def announce(self, name: str | None, value: Any) -> tuple[str, Any]:
        """Broadcast a command of rank 0; returns it on every rank."""
        command = [name, value]
        dist.broadcast_object_list(command, src=0, group=self.commands)
        return command[0], command[1]

    def follow(self) -> None:
        """Execute the commands of rank 0 until it sends `close`."""
        while True:
            self.source.follow()
            name, value = self.announce(None, None)
            if name == "close":
                return
            if name == "step":
                self.step(value)
            else:
                self.save_state(value)


class DeepSpeedTrainer:
    """The controller trains through this class: it is rank 0, and starts the processes of the others."""

    def __init__(
        self,
        config: TrainerConfig,
        seed: int,
        grpo: GrpoConfig,
        weights: Path,
        template: Path,
        run_dir: Path,
        state: dict[str, Any] | None,
    ) -> None:
        """Start the ranks. Raises RunError where one doesn't start, or `state` was left by other settings."""
        self.shape = {"trainer": "deepspeed", "zero_stage": config.zero_stage, "processes": config.processes}
        _check_state(state, self.shape)
        self.run_dir = run_dir
        self._lock = threading.Lock()  # a step has a thread of its own, and may still run when the run is cancelled
        self._followers: list[tuple[Popen[bytes], Path]] = []
        self._led = ExitStack()
        store = dist.TCPStore(HOST, 0, config.processes, is_master=True, wait_for_workers=False)
        first = RankSettings(
            rank=0,
            ranks=config.processes,
            port=store.port,
            weights=str(weights),
            template=str(template),
            states=str(RunDir(run_dir).deepspeed_states),
            resumed_step=state["step"] if state else None,
            zero_stage=config.zero_stage,
            threads=config.threads,
            seed=seed,
            grpo=asdict(grpo),
        )
        try:
            for rank in range(1, config.processes):
                self._followers.append(_start(first.model_copy(update={"rank": rank}), run_dir))
            self._wait_for_followers(store)
            self._mine = TrainerRank(first, store)
        except Exception as error:
            explained = self._explain(error)
            self._end_followers()
            raise explained from error
        self.source = self._mine.source
        self._led.enter_context(self.source.leading())

    def step(self, groups: Groups) -> StepMetrics:
        with self._on_all_ranks("step", groups):
            return self._mine.step(groups)

    def save_state(self, run_dir: Path, step: int) -> None:
        with self._on_all_ranks("save_state", step):
            self._mine.save_state(step)
        save_trainer_state(run_dir, {**self.shape, "step": step})
        for older in RunDir(run_dir).deepspeed_states.iterdir():
            if older.is_dir() and older.name != version_name(step):
                shutil.rmtree(older)

    def close(self) -> None:
        if self._lock.acquire(timeout=CLOSE_S):
            # A follower that failed is gone, and can't receive a command.
            with suppress(RuntimeError, TimeoutExpired):
                self._send("close", None)
                for follower, _ in self._followers:
                    follower.wait(CLOSE_S)
        self._end_followers()
        dist.destroy_process_group()

    @contextmanager
    def _on_all_ranks(self, name: str, value: Any) -> Iterator[None]:
        """Run a command on all ranks; between two commands the others follow the source."""
        with self._lock:
            try:
                self._send(name, value)
                yield
            except RuntimeError as error:
                raise self._explain(error) from error
            finally:
                self._led.enter_context(self.source.leading())

    def _send(self, name: str, value: Any) -> None:
        self._led.close()  # the others leave source.follow()
        self._mine.announce(name, value)

    def _explain(self, error: Exception) -> Exception:
        """Return the error, or what ended a follower: rank 0 sees only that a connection is gone."""
        for number, (follower, log) in enumerate(self._followers, 1):
            with suppress(TimeoutExpired):
                follower.wait(NOTICE_S)
            if follower.poll() not in (None, 0):
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                return RunError(f"trainer rank {number} ended: {lines[-1].strip() if lines else 'no output'} ({log})")
        return error

    def _wait_for_followers(self, store: dist.Store) -> None:
        """Wait until each follower is about to join the others: joining wouldn't notice that one has ended."""
        here = [f"rank{number}" for number, _ in enumerate(self._followers, 1)]
        until = time.monotonic() + START_S
        while here and not store.check(here):
            if any(follower.poll() is not None for follower, _ in self._followers):
                raise RunError("a trainer rank ended before it met the others")
            if time.monotonic() > until:
                raise RunError(f"the trainer's ranks didn't start within {START_S:g} s; see {self._followers[0][1]}")
            time.sleep(POLL_S)

    def _end_followers(self) -> None:
        for follower, _ in self._followers:
            engine_guard.end_guarded(follower)
        self._followers = []


def _start(settings: RankSettings, run_dir: Path) -> tuple[Popen[bytes], Path]:
    log = RunDir(run_dir).trainer_log(settings.rank)
    command = [sys.executable, "-m", "slime_backend.local_trainer.deepspeed_rank", settings.model_dump_json()]
    return engine_guard.start_guarded(command, os.environ, log), log


def _check_state(state: dict[str, Any] | None, shape: dict[str, Any]) -> None:
    found = {name: (state or shape).get(name) for name in shape}
    if found != shape:
        raise RunError(f"the run was trained with {found} and can't go on with {shape}; set those keys as they were")
