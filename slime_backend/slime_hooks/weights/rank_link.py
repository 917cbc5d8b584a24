"""What one of the trainer's ranks keeps between publications: the engines as slime lists them, its clients to them, the
other ranks, and on rank 0 the publisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime_backend.engine_client import EngineClient
from slime_backend.event_loop import LoopThread
from slime_backend.publication import PublicationReport
from slime_backend.slime_hooks.engines.ray_engines import RayEngine, RayEngines
from slime_backend.slime_hooks.weights import publisher as publishers
from slime_backend.slime_hooks.weights.publisher import SlimePublisher, name_of
from slime_backend.slime_hooks.weights.ranks import MAX_ROUNDS
from slime_backend.slime_hooks.weights.weight_group import FREED_S
from slime_backend.transports import Transport
from slime_backend.transports.collective import CollectiveTransport

CONNECT_S = 120.0  # for the ranks and the engines to meet in a weight-update group


class SlimeRanks:
    """The trainer's ranks over slime's gloo group."""

    @property
    def rank(self) -> int:
        import torch.distributed as dist

        return int(dist.get_rank())

    def share(self, value: Any) -> Any:
        import torch.distributed as dist
        from slime.utils.distributed_utils import get_gloo_group

        box = [value]
        dist.broadcast_object_list(box, src=0, group=get_gloo_group())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist
        from slime.utils.distributed_utils import get_gloo_group

        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=get_gloo_group())
        return values


@dataclass(slots=True)
class Link:
    """What one rank keeps between publications, for one updater."""

    args: Any
    actors: list[Any] = field(default_factory=list)
    gpu_counts: list[int] = field(default_factory=list)
    engines: RayEngines = field(default_factory=RayEngines)
    ranks: SlimeRanks = field(default_factory=SlimeRanks)
    connected: frozenset[str] = frozenset()  # keys of the engines in the weight-update group; empty without one
    publisher: SlimePublisher | None = None  # on rank 0
    _loop: LoopThread | None = None
    _clients: dict[str, EngineClient] = field(default_factory=dict)

    @property
    def loop(self) -> LoopThread:
        if self._loop is None:
            self._loop = self.publisher.loop if self.publisher else LoopThread()
        return self._loop

    def leads(self, base: str) -> SlimePublisher | None:
        """The publisher, on rank 0. `base`: the version that the engines have before the first publication."""
        if self.ranks.rank == 0 and self.publisher is None:
            self.publisher = publishers.make(self.args, base)
        return self.publisher

    def leader(self, version: str, base: str, transport: Callable[[list[RayEngine]], Transport]) -> Leader | None:
        """Rank 0's side of a publication; None on the others."""
        publisher = self.leads(base)
        return None if publisher is None else Leader(self, publisher, version, transport)

    def collective(self, name: str) -> CollectiveTransport:
        rounds_s = MAX_ROUNDS * (self.args.reef_load_timeout + CONNECT_S + FREED_S)
        return CollectiveTransport(self.loop, rounds_s, name)

    def by_name(self, names: Sequence[str]) -> dict[str, RayEngine]:
        found = {name_of(engine.url): engine for engine in self.engines.of(self.actors)}
        return {name: found[name] for name in names if name in found}

    def client(self, engine: RayEngine) -> EngineClient:
        if engine.key not in self._clients:
            self._clients[engine.key] = EngineClient(
                engine.url,
                name=name_of(engine.url),
                deadlines=publishers.deadlines(self.args),
                keys=publishers.engine_keys(self.args),
            )
        return self._clients[engine.key]


@dataclass(slots=True)
class Leader:
    link: Link
    publisher: SlimePublisher
    version: str
    transport: Callable[[list[RayEngine]], Transport]

    def start(self) -> tuple[Future[PublicationReport], CollectiveTransport | None]:
        engines = self.link.engines.of(self.link.actors)
        self.publisher.enroll(engines)
        transport = self.transport(engines)
        collective = transport if isinstance(transport, CollectiveTransport) else None
        return self.publisher.start(transport, self.version), collective

    def finish(self, future: Future[PublicationReport]) -> dict[str, float]:
        return self.publisher.finish(future)


def link_of(updater: Any) -> Link:
    if not hasattr(updater, "reef_link"):
        updater.reef_link = Link(updater.args)
    return updater.reef_link  # type: ignore[no-any-return]
