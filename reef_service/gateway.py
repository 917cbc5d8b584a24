"""The gateway: everything that lives as long as the process does, put together and taken apart.

async with running_gateway(config, fleet, model, store, run_dir) as gateway:
    app = make_app(gateway)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reef_service.config import GatewayConfig
from reef_service.connections import Connections
from reef_service.data_plane.admission import Gate
from reef_service.data_plane.limits import Limits
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.sessions import Sessions
from reef_service.descriptors import connections_that_fit
from reef_service.metrics import Metrics
from reef_service.publisher import Publisher, brief
from reef_service.retention import Retention
from reef_service.store import Store, StoreError
from reef_service.text.tokenizer import ModelTokenizer
from reef_service.watch import Watch
from slime_backend.config import ConfigError
from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_client.keys import EngineKeys
from slime_backend.fleet import EngineUnfit, Fleet, FleetError, admit
from slime_backend.policy import Policy
from slime_backend.run_files import RunDir

PROBE_S, PROBE_WAIT_S = 1.0, 5.0  # between two looks whether the store writes; for one of them
MORE_VALUES = 200_000  # of a body, not counting token ids
GRACE_S = 5.0  # for answers that are under way when the gateway is asked to stop
NEEDED_HOOK = "kv_spans"  # without it no answer has the provenance that is to be recorded


@dataclass(slots=True)
class Gateway:
    config: GatewayConfig
    plane: DataPlane
    publisher: Publisher
    watch: Watch
    connections: Connections
    started_at: float = field(default_factory=time.time)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _probe: asyncio.Future[None] | None = None
    _probed_at: float = 0.0

    async def stop(self) -> None:
        """Before the server is closed: pages are let go, requests end or are ended, recorded as far as they came."""
        self.stopping.set()
        await self.plane.close(GRACE_S)

    @property
    def fleet(self) -> Fleet:
        return self.plane.fleet

    @property
    def store(self) -> Store:
        return self.plane.store

    async def store_writes(self) -> bool:
        """Return whether the store writes; it is probed once a second at most."""
        if self._probe is None or (self._probe.done() and time.monotonic() - self._probed_at > PROBE_S):
            self._probed_at, self._probe = time.monotonic(), asyncio.ensure_future(self.store.probe())
        try:
            async with asyncio.timeout(PROBE_WAIT_S):
                await asyncio.shield(self._probe)
        except (StoreError, TimeoutError):
            return False
        return True

    async def state(self) -> dict[str, Any]:
        """Return what the page shows."""
        gate, quarantine = self.plane.gate, self.fleet.quarantine
        return {
            "now": time.time(),
            "started_at": self.started_at,
            "policy": str(self.fleet.policy),
            "version": self.fleet.version,
            "model": self.plane.model,
            "engines": self.watch.engines(),
            "gate": {"closed": gate.closed, "inside": gate.inside, "waiting": gate.waiting, "refused": gate.refused},
            "quarantine": {
                "count": quarantine.count,
                "refused": quarantine.refused,
                "latest": quarantine.latest(),
            },
            "recent": self.plane.metrics.recent.to_json(),
            "publications": self.publisher.timeline[-12:],
            "store": await self.store.counts(),
        }


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, fleet: Fleet, model: Path, store: Store, run_dir: Path | None
) -> AsyncIterator[Gateway]:
    """Raises TokenizerError, EngineUnfit, StoreError."""
    for member in fleet.members.values():
        if NEEDED_HOOK not in member.hooks:
            raise EngineUnfit(
                f"engine {member.name}: a gateway records where every token came from; the hook {NEEDED_HOOK} isn't "
                f"active; start the engine with REEF_SLIME_HOOKS={','.join((*fleet.policy.needed_hooks, NEEDED_HOOK))}"
            )
    gate = Gate(limit=config.max_concurrent, queue=config.max_waiting, hold_s=config.hold_s)
    metrics = Metrics(fleet, gate)
    watch = Watch(fleet, config.watch_s)
    metrics.on_turn = watch.turn
    tokenizer = ModelTokenizer(model)
    plane = DataPlane(
        fleet=fleet,
        store=store,
        tokenizer=tokenizer,
        gate=gate,
        limits=_limits(config, model, tokenizer, await _engines_bound(fleet)),
        sessions=Sessions(store, most=config.sessions_in_memory, tokens=config.tokens_in_memory),
        metrics=metrics,
        model=config.model_name or model.name,
    )
    connections = Connections(
        most=connections_that_fit(config, len(fleet.members)),
        head_s=config.head_s,
        body_s=config.body_s,
        idle_s=config.idle_s,
    )
    metrics.watch_connections(connections)
    fleet.quarantine.keep_s = config.quarantine_s
    publisher = Publisher(fleet, gate, store, metrics, RunDir(run_dir).all_weights if run_dir else None)
    await _note_version(publisher, model)
    retention = Retention(store, plane.sessions, config.keep_trained_s, config.keep_gib)
    tasks = [asyncio.create_task(work) for work in (watch.run(), retention.run())]
    try:
        yield Gateway(config, plane, publisher, watch, connections)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await plane.close(0)
        plane.workers.close()


async def join_engines(
    policy: Policy,
    urls: list[str],
    clients: list[EngineClient],
    *,
    keys: EngineKeys | None = None,
    deadlines: Deadlines | None = None,
    wait_s: float = 60.0,
) -> Fleet:
    """A fleet of engines that somebody else started, at the version that most of them serve; the others join at the
    next publication. `clients` is filled, for the caller to close.

    Raises ConfigError without URLs, FleetError, EngineError."""
    if not urls:
        raise ConfigError("gateway.engines is empty; name the engines' base URLs, or use `reef-slime up`")
    clients += [EngineClient(url, name=f"engine{i}", keys=keys, deadlines=deadlines) for i, url in enumerate(urls)]
    labels = await asyncio.gather(*(client.weight_version() for client in clients))
    version = max(labels, key=labels.count) or "v0"
    fleet = Fleet(policy, version, wait_s=wait_s)
    for client in clients:
        await admit(fleet, client)
    if not fleet.routable():
        raise FleetError(
            f"no engine is confirmed at version {version!r}; a publisher that died may have left them paused"
        )
    return fleet


async def _note_version(publisher: Publisher, model: Path) -> None:
    """The version that the engines serve at start, as the next in the list unless it is the last one."""
    store, version = publisher.store, publisher.fleet.version
    known = await store.publications(limit=50)
    publisher.timeline = [brief(json.loads(p["report"])) for p in reversed(known) if p["report"] != "{}"]
    successful = [p for p in known if p["state"] in ("found", "resumed")]
    if not successful or successful[0]["version"] != version:
        await store.add_publication(version, "found", checkpoint=str(model.resolve()))
        publisher.link(version, model)


async def _engines_bound(fleet: Fleet) -> int | None:
    """Return how many tokens of a prompt every engine takes: of a context SGLang keeps some for itself, and it alone
    knows how many. None where no engine tells."""
    infos = await asyncio.gather(
        *(member.client.server_info() for member in fleet.members.values()), return_exceptions=True
    )
    found = [info.get("max_req_input_len") for info in infos if isinstance(info, dict)]
    # It refuses a prompt of just so many.
    return min((length - 1 for length in found if type(length) is int and length > 1), default=None)


def _limits(config: GatewayConfig, model: Path, tokenizer: ModelTokenizer, engines: int | None) -> Limits:
    prompt = config.max_prompt_tokens if engines is None else min(config.max_prompt_tokens, engines)
    found = Limits(_context(config, model), prompt, config.max_output_tokens)
    return replace(found, characters=found.most * tokenizer.longest, values=found.prompt + MORE_VALUES)


def _context(config: GatewayConfig, model: Path) -> int:
    if config.context_length is not None:
        return config.context_length
    file = model / "config.json"
    known = json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None
    return int(known or config.max_prompt_tokens + config.max_output_tokens)
