"""One broadcast from the trainer to many engines that can't hang: the engines' answers and the broadcast are watched
together.

slime looks at what an engine answered only after the broadcast, and the broadcast ends only when every engine has
joined it. An engine that refuses the request, or is dead, leaves the trainer and the other engines waiting for ever.
Here a refusal or the deadline ends the broadcast, and its group is broken up on both sides, which frees the engines
that wait inside it. What was wrong is noted, not raised: the other ranks are in the middle of the same collectives, so
the rest of the weights is gathered as usual and sent to nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.event_loop import LoopThread

log = logging.getLogger(__name__)

POLL_S = 0.001
FREED_S = 15.0  # for the engines inside a broken broadcast to notice and answer

NamedTensor = tuple[str, Any]  # a torch tensor; every Ray worker imports this file, few need torch


@dataclass(slots=True)
class Sending:
    """What one rank sends in one round: to whom, until when, and what went wrong. Engines by name."""

    loop: LoopThread
    clients: Mapping[str, EngineClient]
    deadline_s: float
    failed: dict[str, str] = field(default_factory=dict)
    until: float = field(init=False)
    _broken_group: str | None = None
    _in_broken: dict[str, Future[None]] = field(default_factory=dict)  # answers that were awaited when it broke

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.deadline_s

    @property
    def over(self) -> bool:
        """Nothing more is sent: what follows in this round would reach engines that don't have what came before."""
        return bool(self.failed) or self.broken

    def take_tensors(self, engine: str, serialized: Sequence[str], load_format: str | None) -> None:
        """Have one engine load tensors from shared memory, and wait for its answer."""
        if self.over:
            return
        answer = self._ask(self.clients[engine].take_tensors(serialized, load_format))
        if not _all_done([answer], self.until - time.monotonic()):
            self.failed[engine] = f"it didn't take the weights within {self.deadline_s:g} s"
        elif why := _why(answer):
            self.failed[engine] = why

    def broadcast(
        self,
        group_name: str,
        group: Any,
        engines: Sequence[str],
        tensors: Sequence[NamedTensor],
        load_format: str | None,
    ) -> None:
        """Broadcast `tensors` from rank 0 of `group` to `engines`, and wait until each has loaded them."""
        if self.over:
            return
        answers = {
            name: self._ask(
                self.clients[name].receive_tensors(
                    names=[n for n, _ in tensors],
                    dtypes=[str(t.dtype).removeprefix("torch.") for _, t in tensors],
                    shapes=[list(t.shape) for _, t in tensors],
                    group=group_name,
                    load_format=load_format,
                )
            )
            for name in engines
        }
        # The tensors outlive the sends: the caller holds them.
        import torch.distributed as dist

        works: list[Any] = [dist.broadcast(t.data, 0, group=group, async_op=True) for _, t in tensors]
        refused = self._watch(answers, works)
        if refused is None:
            try:
                for work in works:
                    work.wait()
                return
            except RuntimeError as error:  # our side broke, whatever the engines answer
                refused = dict.fromkeys(engines, f"the broadcast to it failed: {error}")
        self.failed |= refused
        self._in_broken = {name: answer for name, answer in answers.items() if name not in refused}
        self._broken_group = group_name

    def _ask(self, call: Coroutine[Any, Any, None]) -> Future[None]:
        return self.loop.submit(call)

    def _leave(self, engine: str, group_name: str) -> Future[None]:
        return self._ask(_quietly(self.clients[engine].leave_weight_group(group_name)))

    def _watch(self, answers: Mapping[str, Future[None]], works: Sequence[Any]) -> dict[str, str] | None:
        """None once every engine has it. Else those that refused while the others waited; empty at the deadline."""
        while True:
            refused = {name: why for name, answer in answers.items() if answer.done() and (why := _why(answer))}
            if refused:
                return refused
            if all(answer.done() for answer in answers.values()) and all(work.is_completed() for work in works):
                return None
            if time.monotonic() > self.until:
                return {}
            time.sleep(POLL_S)

    @property
    def broken(self) -> bool:
        """A broadcast was left in the middle: its group must be given up, and `free` called."""
        return self._broken_group is not None

    def free(self) -> None:
        """Free the engines that wait inside the broken broadcast, and find out which of them still answer.

        They wait for a peer: for us (`give_up` comes first), or, where the broadcast runs along a tree, for another
        engine. So each one that answers is asked to close its own side of the group, which frees the ones behind it.
        """
        group_name, waiting = self._broken_group, self._in_broken
        if group_name is None:
            return
        leaving = {name: self._leave(name, group_name) for name in self.failed if name in self.clients}
        until = time.monotonic() + FREED_S
        while time.monotonic() < until and not all(answer.done() for answer in (*waiting.values(), *leaving.values())):
            for name, answer in waiting.items():
                if answer.done() and name not in leaving:
                    leaving[name] = self._leave(name, group_name)
            time.sleep(POLL_S)
        # Whatever an engine answers now, it can be sent to again.
        self.failed |= {
            name: "it doesn't answer: it waits in the broadcast that was given up, or hangs"
            for name, answer in waiting.items()
            if not answer.done()
        }
        if not self.failed:  # past the deadline, and freed they all answer: nobody to blame, nobody to trust
            self.failed |= dict.fromkeys(waiting, f"it didn't take the weights within {self.deadline_s:g} s")


def _all_done(answers: Sequence[Future[None]], wait_s: float) -> bool:
    return not futures.wait(answers, timeout=max(0.0, wait_s)).not_done


def give_up(holder: list[Any]) -> None:
    """Close our side of the group in `holder`, in a thread: gloo ends only after what is under way in it.

    Peers that wait for us go on when its sockets close, and these close with the last reference: the caller keeps none.
    """
    threading.Thread(target=_close, args=(holder,), name="reef-slime-give-up", daemon=True).start()


def _close(holder: list[Any]) -> None:
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    try:
        getattr(c10d, "_abort_process_group", dist.destroy_process_group)(holder[0])  # torch has it from 2.6 on
    except Exception as error:  # a group that is broken already; nothing depends on it any more
        log.warning("a weight-update group could not be destroyed: %s", error)
    holder.clear()


def _why(answer: Future[None]) -> str:
    error = answer.exception()
    if error is None:
        return ""
    return error.seen if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except EngineError as error:
        log.warning("%s", error)
