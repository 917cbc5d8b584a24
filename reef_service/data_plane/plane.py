"""What all requests share: the fleet with router and gate, the store with its sessions, the tokenizer, the limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from reef_service.data_plane.admission import Gate
from reef_service.data_plane.answers import TokenRequest
from reef_service.data_plane.conversations import Conversations
from reef_service.data_plane.generation import STOP_S, Generation
from reef_service.data_plane.limits import Limits
from reef_service.data_plane.repeats import Repeats
from reef_service.data_plane.router import Router
from reef_service.data_plane.sessions import Sessions
from reef_service.data_plane.workers import Workers
from reef_service.metrics import Metrics
from reef_service.store import Store
from reef_service.text.tokenizer import ModelTokenizer
from slime_backend.fleet import Fleet
from slime_backend.wire import ANCHORS_HOOK, ANCHORS_KEY


class UnderWay(Protocol):
    """A request that has begun: what ends with the gateway. An Exchange."""

    task: asyncio.Task[None]

    def abandon(self) -> None: ...


@dataclass(slots=True)
class DataPlane:
    fleet: Fleet
    store: Store
    tokenizer: ModelTokenizer
    gate: Gate
    limits: Limits
    sessions: Sessions
    metrics: Metrics
    model: str  # the name that clients see
    router: Router = field(init=False)
    repeats: Repeats = field(init=False)
    workers: Workers = field(default_factory=Workers)
    conversations: Conversations = field(default_factory=Conversations)
    exchanges: set[UnderWay] = field(default_factory=set)  # under way

    def __post_init__(self) -> None:
        self.router = Router(self.fleet)
        self.repeats = Repeats(self.store)

    def generation(self, request: TokenRequest, receipt: str) -> Generation:
        sampling = dict(request.sampling)
        if not sampling.get("ignore_eos"):
            ends = dict.fromkeys([*self.tokenizer.end_ids, *sampling.get("stop_token_ids", ())])
            sampling["stop_token_ids"] = list(ends)
        anchors = self._anchors(request)
        if anchors:
            sampling["custom_params"] = {**sampling.get("custom_params", {}), ANCHORS_KEY: anchors}
        return Generation(
            self.fleet,
            self.router.choose_for(request.prompt_ids, request.session),
            receipt,
            list(request.prompt_ids),
            sampling,
            stream=request.stream or bool(request.stop),
        )

    def _anchors(self, request: TokenRequest) -> list[int]:
        """Where other prompts may leave this one, for models whose sliding windows must be kept there:

            the turn before     another branch of the conversation begins after it
            the last turn       what of it this prompt begins with, others of the session may begin with too
            the prompt's end    a retry, or another sample of this turn

        What lies between, the engine finds by the marks of the messages (engine_plugin/message_marks.py).
        """
        if not self.fleet.has_hook(ANCHORS_HOOK) or "custom_params" in request.sampling:
            return []
        end = len(request.prompt_ids) - 1
        leaves = self.sessions.leaves(request.session, request.parent, request.prompt_ids) if request.session else []
        return sorted({place for place in (*leaves, end) if 0 < place <= end})

    async def close(self, grace_s: float) -> None:
        """Let what is under way end within `grace_s`, then end it, recorded as far as it came."""
        await self._until_none(grace_s)
        for exchange in list(self.exchanges):
            exchange.abandon()
        await self._until_none(2 * STOP_S)
        for exchange in list(self.exchanges):
            exchange.task.cancel()

    async def _until_none(self, seconds: float) -> None:
        tasks = [exchange.task for exchange in self.exchanges]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
