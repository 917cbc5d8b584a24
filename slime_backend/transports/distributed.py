"""Weights by broadcast from the trainer to each engine, over one process group per engine, with all its tensor ranks.

One group for the whole fleet would be the usual form, but there a single engine that rejects the update leaves the
trainer and every other engine waiting in the collective. With a group per engine a failure stays with its engine, and
the trainer's side polls, so that a rejected update ends the broadcast at once.

SGLang 0.5.23 builds its side with torch's `_new_process_group_helper` (srt/utils/common.py): group name, then device,
prefix the store's keys. Updates must lie between /begin_weight_update and /end_weight_update.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.transports.arrivals import LATE_S
from slime_backend.transports.base import Refused, TransportError
from slime_backend.transports.one_pass import OnePass
from slime_backend.transports.served import Info, ServedModels, local_address, why_no_group, why_unreachable
from slime_backend.weight_sources import WeightSource
from slime_backend.weight_sources.base import headers_of
from slime_backend.weight_sources.buckets import BUCKET_BYTES, in_buckets
from slime_backend.weight_sources.digests import SentDigests

log = logging.getLogger(__name__)

POLL_S = 0.0005
SLACK_S = 5.0  # gloo ends a send at the group's timeout, or a moment later
LOOPBACK = "127.0.0.1"
OUTLIVE = "reef-slime-given-up-group"


class EngineGroup:
    """A gloo group of the trainer (rank 0) and the tensor ranks of one engine (ranks 1 and up)."""

    def __init__(self, name: str, host: str, timeout_s: float, engine_ranks: int = 1) -> None:
        self.name, self.host, self.timeout_s, self.size = name, host, timeout_s, 1 + engine_ranks
        self.store = dist.TCPStore(
            host, 0, self.size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.port: int = self.store.port
        self._group: Any = None  # torch ships no types for the methods of its process groups
        self._stop = threading.Event()

    def connect(self) -> None:
        """Meet the engine's ranks; blocks until all have come, or raises after the timeout."""
        store: dist.Store = self.store
        for prefix in (self.name, f"{self.name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, 0, self.size, timedelta(seconds=self.timeout_s))

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors in order. Raises TimeoutError at the deadline, or InterruptedError once `stop` is called."""
        if self._group is None:
            raise RuntimeError("not connected")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        until = time.monotonic() + self.timeout_s
        # The tensors must outlive the sends, so the list holds them.
        works = [(self._group.broadcast([t], options), t) for t in tensors]
        try:
            for work, _ in works:
                while not work.is_completed():
                    if self._stop.is_set():
                        raise InterruptedError("the engine gave up")
                    if time.monotonic() > until:
                        raise TimeoutError(f"the engine took no tensor for {self.timeout_s:g} s")
                    time.sleep(POLL_S)
                work.wait()
        except BaseException:
            threading.Thread(target=_outlive, args=(self._group, works, until), name=OUTLIVE, daemon=True).start()
            raise

    def stop(self) -> None:
        self._stop.set()


def _processes(client: EngineClient) -> frozenset[str]:
    """The scheduler processes that the client heard of last: the publication asks before it calls `prepare`."""
    return getattr(client, "instances", frozenset())


def _outlive(group: Any, works: Sequence[tuple[Any, torch.Tensor]], until: float) -> None:
    """Hold a given-up group until nothing is being sent any more: its destructor waits for that, and may run on the
    event loop, while engines are paused."""
    while time.monotonic() < until + SLACK_S and not all(work.is_completed() for work, _ in works):
        time.sleep(0.1)


class DistributedTransport:
    """Broadcasts the source's tensors to each engine, one HTTP call per bucket. One instance serves all publications of
    a run."""

    name = "distributed"

    def __init__(
        self,
        source: WeightSource,
        *,
        host: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        connect_s: float = 60.0,
        compare: bool = True,
        late_s: float = LATE_S,
    ) -> None:
        """`host`: an address of this machine that the engines reach; without, the one from which each is reached.
        `compare`: names and shapes of the source with the checkpoint that the engines were started with.
        `late_s`: how long the engines that load wait for one whose load hasn't begun."""
        self.source = source
        self.host = host
        self.bucket_bytes = bucket_bytes
        self.connect_s = connect_s
        self.late_s = late_s
        self._pairs: dict[str, tuple[EngineClient, EngineGroup]] = {}
        self._joined_by: dict[str, frozenset[str]] = {}  # engine -> the scheduler processes that are in its group
        self._unjoined: dict[str, Refused] = {}  # engine -> why it has no group
        self._served = ServedModels()
        self._compare = compare
        self._pass: OnePass[list[tuple[str, torch.Tensor]]] | None = None
        self._to_come: set[str] = set()  # engines whose load hasn't begun
        self._digest_bytes = 0.0  # of a source that may be digested while it is sent
        self._sent: SentDigests | None = None

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        """Connect to the engines that have no group yet; `why_not` names those that didn't join.

        Raises CheckpointUnfit where the source isn't the model that the engines serve.
        """
        self._unjoined.clear()
        infos = await self._served.infos(clients)
        headers = headers_of(self.source) if self._compare else None
        if headers is not None:
            await self._served.check(headers, infos.values())
        for client in clients:
            known = self._pairs.get(client.name)
            if known is not None and (known[0] is not client or _processes(client) != self._joined_by[client.name]):
                self._drop(client.name)  # another process at the same address is in no group
        new = [client for client in clients if client.name not in self._pairs]
        await asyncio.gather(*(self._connect(client, infos.get(client.name)) for client in new))
        self.expect_loads([client for client in clients if client.name in self._pairs])

    def expect_loads(self, clients: Sequence[EngineClient]) -> None:
        """Who reads the source together. Until this is called behind the pause, those that joined are expected."""
        self._pass, self._to_come = None, {client.name for client in clients}

    def expect_digests(self, ahead_bytes: float, paused_bytes: float) -> None:
        self._digest_bytes, self._sent = paused_bytes, None

    async def digests(self) -> Mapping[str, Sequence[str]] | None:
        """Of the tensors that were sent; None where the source says nothing of its size."""
        return self._sent.digests if self._sent is not None else None

    def _bytes(self) -> float:
        """The size of all that is sent."""
        headers = headers_of(self.source)
        return math.inf if headers is None else headers.nbytes

    def why_not(self, client: EngineClient) -> Refused | None:
        return None if client.name in self._pairs else self._unjoined.get(client.name)

    async def _connect(self, client: EngineClient, info: Info | None) -> None:
        """Meet the engine's ranks. What can't succeed is found before the engine is asked: its scheduler waits in
        SGLang's rendezvous, generates nothing meanwhile, and takes no timeout from here (0.5.23,
        managers/io_struct.py, InitWeightsUpdateGroupReqInput)."""
        if info is None:
            self._refuse(client, self._served.silent.get(client.name, "it didn't answer"), unknown=True)
            return
        url = str(getattr(client, "url", ""))
        try:
            host = self.host or (local_address(url) if url else LOOPBACK)
        except OSError as error:
            self._refuse(client, f"there is no way from this machine to {url} ({error})")
            return
        if why := why_no_group(info) or (why_unreachable(url, host) if url else None):
            self._refuse(client, why)
            return
        # A fresh name each time: an engine that kept a broken group refuses a second one of the same name.
        timeout_s = min(self.connect_s, client.deadlines.load)
        ranks = int(info.get("tp_size") or 1)
        try:
            pair = EngineGroup(f"reef-slime-{uuid.uuid4().hex}", host, timeout_s, ranks)
        except (RuntimeError, OSError) as error:
            self._refuse(client, f"no group can be opened at {host}: {str(error).partition(chr(10))[0]}")
            return
        meet = asyncio.create_task(asyncio.to_thread(pair.connect))
        # Without this line a refused join would leave an exception that nobody reads when `meet` times out.
        meet.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                await client.join_weight_group(
                    address=host, port=pair.port, rank_offset=1, world_size=pair.size, group=pair.name, backend="gloo"
                )
                await meet
        except TimeoutError:
            self._refuse(
                client,
                f"it didn't within {timeout_s:g} s; it must reach {host}:{pair.port}, and its scheduler may wait for "
                "that, without generating, until SGLang gives up",
                unknown=True,
            )
            return
        except (EngineError, RuntimeError) as error:
            # This engine alone has no group; `why_not` and `load` name it.
            seen = getattr(error, "seen", f"{type(error).__name__}: {error}")
            self._refuse(client, seen, unknown=getattr(error, "took_effect", False) is None)
            return
        self._pairs[client.name] = (client, pair)
        self._joined_by[client.name] = _processes(client)

    def _refuse(self, client: EngineClient, why: str, *, unknown: bool = False) -> None:
        self._unjoined[client.name] = Refused(f"it didn't join the weight-update group: {why}", unknown)

    async def load(self, client: EngineClient, version: str) -> None:
        try:
            # In the pass before anything can fail: the others wait until this engine is in it, or out of it again. The
            # session ends outside of the reader: the others' buckets don't wait for it.
            async with AsyncExitStack() as session, self._joined_pass(client.name).reader(client.name) as buckets:
                pair = self._pair_of(client)
                await session.enter_async_context(client.weight_session())
                async for bucket in buckets:
                    await self._send(client, pair, bucket)
                    del bucket  # before the next one is gathered
        except BaseException:
            self._drop(client.name)
            raise

    def _pair_of(self, client: EngineClient) -> EngineGroup:
        if client.name not in self._pairs:
            refused = self._unjoined.get(client.name)
            absent = "it didn't join the weight-update group: it wasn't there at `prepare`"
            raise TransportError(client.name, refused.why if refused else absent)
        return self._pairs[client.name][1]

    def _joined_pass(self, engine: str) -> OnePass[list[tuple[str, torch.Tensor]]]:
        """The pass that all engines are in; for one that comes when it has begun, another one, with whoever is late as
        well."""
        if self._pass is None or self._pass.begun:
            if self._pass is not None and engine in self._to_come:
                log.warning("%s began to load late: the weights are read once more for it", engine)
            tensors, self._sent = self.source.named_tensors(), None
            if self._bytes() <= self._digest_bytes:
                self._sent = SentDigests()
                tensors = self._sent.taking(tensors)
            buckets = in_buckets(tensors, self.bucket_bytes)
            self._pass = OnePass(buckets, readers=self._to_come, late_s=self.late_s)
        self._to_come.discard(engine)
        return self._pass

    async def _send(self, client: EngineClient, pair: EngineGroup, bucket: list[tuple[str, torch.Tensor]]) -> None:
        async def receive() -> None:
            try:
                await client.receive_tensors(
                    names=[name for name, _ in bucket],
                    dtypes=[str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    shapes=[list(t.shape) for _, t in bucket],
                    group=pair.name,
                )
            except BaseException:
                pair.stop()  # nobody takes the rest of the broadcast
                raise

        # The engine's answer decides: it has its own deadline, and its failure stops the broadcast.
        results = await asyncio.gather(
            receive(), asyncio.to_thread(pair.broadcast, [t for _, t in bucket]), return_exceptions=True
        )
        for result in results:
            if isinstance(result, EngineError):
                raise result
            if isinstance(result, BaseException):
                raise TransportError(client.name, f"broadcast: {type(result).__name__}: {result}") from result

    def _drop(self, engine: str) -> None:
        """Forget a broken group; the next `prepare` makes a new one."""
        if engine in self._pairs:
            self._pairs.pop(engine)[1].stop()

    async def close(self) -> None:
        for client, pair in self._pairs.values():
            pair.stop()
            with suppress(EngineError):  # the engine may be gone already
                await client.leave_weight_group(pair.name)
        self._pairs.clear()
