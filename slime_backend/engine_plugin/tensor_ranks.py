"""Brings what each tensor-parallel rank of an engine did and counted to the rank that answers for all of them.

SGLang sends every control message to all ranks and answers with one rank's result: in 0.5.23 a rank that received no
weights writes a line into its log, and the HTTP answer is 200 (scheduler_components/weight_updater.py:149-289). Ranks
that answer are those with attention tensor rank 0, one per data-parallel rank; each gathers the ranks behind it.

The gathering goes through the store of torch's default process group, not through a collective: a rank whose process
lacks this plugin would leave a collective of the others hanging, in a group that SGLang goes on using. A rank leaves
its value under a key and goes on; the rank that answers waits for the values, with a deadline. Ranks that run the
plugin announce themselves when their scheduler is built, which is before any control message can reach it, so a rank
without an announcement is known to be absent and nobody waits for it. With one tensor rank nothing of this happens.

Control messages reach the ranks of one group in the same order, so the n-th call of `share` is about the same message
on each. A rank that writes value n knows that all have read value n-2, and deletes its own.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from slime_backend.engine_plugin import generation

PREFIX = "reef_slime"
ANNOUNCED = "announced"
ABSENT = "reef-slime isn't loaded in its process (REEF_SLIME_HOOKS is to be set on every node)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scheduler process stands among those that do the same work."""

    group: str  # the ranks that one rank answers for share it
    rank: int  # 0: the one that answers
    size: int


class TensorRanks:
    """The ranks that this process's engine computes with; alone until `announce` found others."""

    def __init__(self) -> None:
        self.place = Place("", 0, 1)
        self._store: Any = None
        self._fault = ""  # why nothing can be gathered
        self._shared: defaultdict[str, int] = defaultdict(int)  # calls of `share`, by kind

    def announce(self, place: Place, store: Any) -> None:
        """Take part from now on. `store`: torch.distributed's Store, None where it can't be had."""
        self.place, self._store = place, store
        if place.size == 1:
            return
        if store is None:
            self._fault = "torch's process group has no store"
            return
        store.set(self._key(ANNOUNCED, 0, place.rank), "1")

    def share(self, kind: str, value: dict[str, Any], seconds: float) -> dict[int, dict[str, Any] | str]:
        """Leave `value` for the rank that answers. There: rank -> its value, or why there is none, for the other ranks;
        elsewhere empty. Waits `seconds` at most. Never raises.
        """
        if self.place.size == 1:
            return {}
        number = self._shared[kind]
        self._shared[kind] += 1
        try:
            if not self._fault:
                self._put(kind, number, value)
        except Exception as error:  # a hook never raises into SGLang's scheduler
            self._fault = f"{type(error).__name__}: {error}"
        if self.place.rank:
            return {}
        until = time.monotonic() + seconds
        return {rank: self._get(kind, number, rank, until) for rank in range(1, self.place.size)}

    def _put(self, kind: str, number: int, value: dict[str, Any]) -> None:
        self._store.set(self._key(kind, number, self.place.rank), json.dumps(value))
        if number > 1:
            self._store.delete_key(self._key(kind, number - 2, self.place.rank))

    def _get(self, kind: str, number: int, rank: int, until: float) -> dict[str, Any] | str:
        if self._fault:
            return self._fault
        try:
            if not self._store.check([self._key(ANNOUNCED, 0, rank)]):
                return ABSENT
            key = self._key(kind, number, rank)
            self._store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
            found: dict[str, Any] = json.loads(self._store.get(key))
            return found
        except Exception as error:  # torch raises a RuntimeError of its own at the deadline
            return f"it left no answer within the deadline ({type(error).__name__})"

    def _key(self, kind: str, number: int, rank: int) -> str:
        return f"{PREFIX}/{self.place.group}/{kind}/{number}/{rank}"


RANKS = TensorRanks()


def after_scheduler(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Announce this rank; its scheduler has just been built, so torch's process group exists."""
    try:
        RANKS.announce(Place(*generation.tensor_place(scheduler)), _default_store())
    except Exception as error:  # the report says so, and the controller refuses
        RANKS._fault = f"{type(error).__name__}: {error}"


def _default_store() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store() if c10d.is_initialized() else None
