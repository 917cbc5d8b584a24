"""The distributed transport when engines fail: stand-ins for the engines and their groups (the real ones:
test_publication_engine.py)."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_backend.engine_client import Deadlines, EngineClient, EngineRefused, EngineTimeout
from slime_backend.transports import distributed
from slime_backend.transports.distributed import DistributedTransport, EngineGroup
from tests.waiting import until

DEADLINES = Deadlines(load=50.0, control=2.0)


def test_a_given_up_group_ends_on_a_thread_of_its_own() -> None:
    """Its destructor waits for what is still being sent: 8 s here, in which nothing else would run on this thread."""
    pair = EngineGroup("given-up", "127.0.0.1", 8.0)
    peers: list[Any] = []

    def join(name: str, port: int) -> None:
        store: dist.Store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=8))
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        peers.append(dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=8)))  # and receives nothing

    joining = threading.Thread(target=join, args=(pair.name, pair.port))
    joining.start()
    pair.connect()
    joining.join()
    sent = torch.zeros(1 << 22)
    pair.stop()
    with pytest.raises(InterruptedError):
        pair.broadcast([sent])
    (outliving,) = [t for t in threading.enumerate() if t.name == distributed.OUTLIVE]
    del pair
    gc.collect()
    assert outliving.is_alive()  # the destructor would have taken longer than it
    outliving.join(30)
    assert not outliving.is_alive()


def _receive(rank: int, port: int, shape: list[int], answers: Any) -> None:
    """One tensor rank of an engine, in a process of its own."""
    store: dist.Store = dist.TCPStore("127.0.0.1", port, 3, is_master=False, timeout=timedelta(seconds=20))
    for prefix in ("two-ranks", "two-ranks/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    group: Any = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=20))
    tensor, options = torch.zeros(shape), dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
    answers.put((rank, tensor.tolist()))


def test_every_tensor_rank_of_an_engine_gets_the_tensors() -> None:
    group = EngineGroup("two-ranks", "127.0.0.1", 20.0, engine_ranks=2)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_receive, args=(rank, group.port, [2, 3], answers), daemon=True) for rank in (1, 2)]
    for process in ranks:
        process.start()
    try:
        group.connect()
        sent = torch.arange(6.0).view(2, 3)
        group.broadcast([sent])
        got = dict(answers.get(timeout=20) for _ in ranks)
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    assert got == {1: sent.tolist(), 2: sent.tolist()}


class Group:
    """An EngineGroup that sends nothing."""

    made: list[Group]

    def __init__(self, name: str, host: str, timeout_s: float, engine_ranks: int = 1) -> None:
        self.name, self.port, self.stopped, self.size = name, 1, False, 1 + engine_ranks
        self.made.append(self)

    def connect(self) -> None:
        pass

    def broadcast(self, tensors: Any) -> None:
        if self.stopped:
            raise InterruptedError("the engine gave up")

    def stop(self) -> None:
        self.stopped = True


class Engine:
    """An EngineClient. `fails`: it refuses a bucket, and its answer to the end of its session never comes."""

    deadlines = DEADLINES

    def __init__(self, name: str, fails: bool = False, tensor_ranks: int = 1) -> None:
        self.name, self.fails, self.tensor_ranks = name, fails, tensor_ranks
        self.groups: list[str] = []
        self.worlds: list[int] = []
        self.received = 0
        self.ended_within: list[float | None] = []
        self.may_end = asyncio.Event()

    async def server_info(self) -> dict[str, Any]:
        return {"tp_size": self.tensor_ranks}

    async def join_weight_group(self, *, group: str, world_size: int, **where: Any) -> None:
        self.groups.append(group)
        self.worlds.append(world_size)

    async def leave_weight_group(self, group: str) -> None:
        pass

    weight_session = EngineClient.weight_session

    async def receive_tensors(self, *, group: str, **what: Any) -> None:
        if self.fails:
            raise EngineRefused(self.name, "update", "a shape is wrong")
        self.received += 1

    async def call(self, method: str, path: str, *, body: Any, deadline: float | None = None) -> None:
        if path != "/end_weight_update":
            return
        self.ended_within.append(deadline)
        if self.fails:
            await self.may_end.wait()
            raise EngineTimeout(self.name, "end", "no answer")


class Source:
    read = 0

    def named_tensors(self) -> Any:
        self.read += 1
        return iter([(f"t{i}", torch.zeros(4)) for i in range(3)])


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> DistributedTransport:
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(distributed, "EngineGroup", Group)
    return DistributedTransport(Source(), bucket_bytes=16)  # type: ignore[arg-type]


def test_a_failed_engine_says_why_and_nobody_waits_for_its_end(transport: DistributedTransport, run_async: Any) -> None:
    well, bad = Engine("well"), Engine("bad", fails=True)

    async def scenario() -> None:
        await transport.prepare("v1", [well, bad])  # type: ignore[list-item]
        loads = [asyncio.create_task(transport.load(e, "v1")) for e in (well, bad)]  # type: ignore[arg-type]
        await loads[0]
        assert not loads[1].done()  # the session of the bad one is still being ended
        bad.may_end.set()
        with pytest.raises(EngineRefused, match="a shape is wrong"):
            await loads[1]

    run_async(scenario())
    assert well.received == 3
    assert (well.ended_within, bad.ended_within) == ([DEADLINES.load], [DEADLINES.control])


def test_a_group_is_made_anew_after_a_failure(transport: DistributedTransport, run_async: Any) -> None:
    engine = Engine("engine", fails=True)
    engine.may_end.set()

    async def scenario() -> None:
        await transport.prepare("v1", [engine])  # type: ignore[list-item]
        with pytest.raises(EngineRefused):
            await transport.load(engine, "v1")  # type: ignore[arg-type]
        engine.fails = False
        await transport.prepare("v2", [engine])  # type: ignore[list-item]
        await transport.load(engine, "v2")  # type: ignore[arg-type]

    run_async(scenario())
    assert len(engine.groups) == 2
    assert [group.stopped for group in Group.made] == [True, False]
    assert engine.received == 3


def test_a_group_is_made_anew_after_a_cancelled_load(transport: DistributedTransport, run_async: Any) -> None:
    engine = Engine("engine")
    receiving = asyncio.Event()

    async def never(**what: Any) -> None:
        receiving.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        await transport.prepare("v1", [engine])  # type: ignore[list-item]
        receive, engine.receive_tensors = engine.receive_tensors, never  # type: ignore[method-assign,assignment]
        load = asyncio.create_task(transport.load(engine, "v1"))  # type: ignore[arg-type]
        await receiving.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        engine.receive_tensors = receive  # type: ignore[method-assign]
        await transport.prepare("v2", [engine])  # type: ignore[list-item]
        await transport.load(engine, "v2")  # type: ignore[arg-type]

    run_async(scenario())
    assert engine.ended_within == [DEADLINES.control, DEADLINES.load]
    assert engine.received == 3


def test_a_restarted_engine_of_the_same_name_gets_a_group_of_its_own(
    transport: DistributedTransport, run_async: Any
) -> None:
    before, after = Engine("engine"), Engine("engine")

    async def scenario() -> None:
        await transport.prepare("v1", [before])  # type: ignore[list-item]
        await transport.load(before, "v1")  # type: ignore[arg-type]
        await transport.prepare("v2", [after])  # type: ignore[list-item]
        await transport.load(after, "v2")  # type: ignore[arg-type]
        await transport.prepare("v3", [after])  # type: ignore[list-item]

    run_async(scenario())
    assert (len(before.groups), len(after.groups)) == (1, 1)
    assert [group.stopped for group in Group.made] == [True, False]


@pytest.mark.parametrize("tensor_ranks", [1, 2, 8])
def test_the_group_has_a_place_for_each_tensor_rank(
    transport: DistributedTransport, run_async: Any, tensor_ranks: int
) -> None:
    engine = Engine("engine", tensor_ranks=tensor_ranks)
    run_async(transport.prepare("v1", [engine]))  # type: ignore[list-item]
    assert engine.worlds == [1 + tensor_ranks]
    assert [group.size for group in Group.made] == [1 + tensor_ranks]


@pytest.mark.parametrize("told", [True, False], ids=["by the transaction", "by prepare alone"])
def test_a_load_that_begins_late_is_waited_for(transport: DistributedTransport, run_async: Any, told: bool) -> None:
    first, late = Engine("first"), Engine("late")

    async def scenario() -> None:
        await transport.prepare("v1", [first, late])  # type: ignore[list-item]
        if told:
            transport.expect_loads([first, late])  # type: ignore[list-item]
        loading = asyncio.create_task(transport.load(first, "v1"))  # type: ignore[arg-type]
        await until(lambda: transport._pass is not None and transport._pass._waiting, "it waits for its first bucket")
        await asyncio.gather(loading, transport.load(late, "v1"))  # type: ignore[arg-type]

    run_async(scenario())
    assert (first.received, late.received, transport.source.read) == (3, 3, 1)  # type: ignore[attr-defined]


def test_a_load_that_never_begins_holds_the_others_up_for_a_moment_only(
    transport: DistributedTransport, run_async: Any
) -> None:
    """And gets everything by itself if it does begin at last. The control of the test above: two passes."""
    first, late = Engine("first"), Engine("late")
    transport.late_s = 0.05

    async def scenario() -> None:
        await transport.prepare("v1", [first, late])  # type: ignore[list-item]
        await asyncio.wait_for(transport.load(first, "v1"), 30)  # type: ignore[arg-type]
        await transport.load(late, "v1")  # type: ignore[arg-type]

    run_async(scenario())
    assert (first.received, late.received, transport.source.read) == (3, 3, 2)  # type: ignore[attr-defined]


def test_an_engine_that_will_not_load_is_not_waited_for(transport: DistributedTransport, run_async: Any) -> None:
    """It was prepared for, and then refused to pause."""
    engine, unpaused = Engine("engine"), Engine("unpaused")
    transport.late_s = 600.0

    async def scenario() -> None:
        await transport.prepare("v1", [engine, unpaused])  # type: ignore[list-item]
        transport.expect_loads([engine])  # type: ignore[list-item]
        await asyncio.wait_for(transport.load(engine, "v1"), 30)  # type: ignore[arg-type]

    run_async(scenario())
    assert engine.received == 3
