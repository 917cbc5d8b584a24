"""A real gloo group of a trainer and three engines, one of which refuses the update: the others are freed, also the one
that waits in the broadcast's tree behind the one that refused. The engines' HTTP side is fake, their broadcast is not.
"""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.event_loop import LoopThread
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.http_server import Reply
from slime_backend.slime_hooks.weights.weight_group import Sending, give_up

SIZE = 4  # ranks: the trainer and three engines
STUCK_S = 60.0  # what an engine waits by itself; SGLang's is half an hour


def gloo(port, rank):
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)  # its own: one that waits would block the others
    return dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, SIZE, timedelta(seconds=STUCK_S))


class GlooEngine(FakeEngine):
    """Takes a broadcast in a thread, as SGLang's scheduler does."""

    def __init__(self):
        super().__init__()
        self.group, self.refuses = None, False

    async def on_update_weights_from_distributed(self, body):
        if self.refuses:
            return Reply({"success": False, "message": "no"}, 400)

        def receive():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            tensors = [torch.zeros(shape) for shape in body["shapes"]]
            works = [self.group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                work.wait()
            return float(tensors[-1][0])

        try:
            self.received = await asyncio.to_thread(receive)
        except RuntimeError as error:
            return Reply({"success": False, "message": f"Failed to receive weights: {error}"}, 400)
        return Reply({"success": True, "message": "Success"})

    async def on_destroy_weights_update_group(self, body):
        self.group = None
        gc.collect()
        return Reply({"success": True, "message": "destroyed"})


@pytest.fixture
def gloo_engines(monkeypatch):
    loop = LoopThread()
    engines = [GlooEngine() for _ in range(SIZE - 1)]
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    async def start():
        await asyncio.gather(*(engine.start() for engine in engines))
        groups = await asyncio.gather(*(asyncio.to_thread(gloo, store.port, rank) for rank in range(SIZE)))
        for engine, group in zip(engines, groups[1:], strict=True):
            engine.group = group
        return groups[0]

    trainer = {"group": loop.submit(start()).result(30)}

    def broadcast(tensor, source, *, group, async_op):
        options = dist.BroadcastOptions()
        options.rootRank = source
        return group.broadcast([tensor], options)

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", lambda group: None)
    clients = {
        f"e{i}": EngineClient(e.url, name=f"e{i}", deadlines=Deadlines(load=300.0)) for i, e in enumerate(engines)
    }
    yield loop, engines, clients, trainer
    trainer.clear()
    for engine in engines:
        engine.group = None
        loop.submit(engine.stop()).result(30)
    loop.stop()


def send(loop, clients, trainer):
    sending = Sending(loop, clients, 300.0)
    # More than gloo has threads: behind the first ones, that wait for the engine which refuses, the rest never starts.
    tensors = [(str(i), torch.full((4,), 7.0)) for i in range(10)]
    sending.broadcast("g", trainer["group"], list(clients), tensors, None)
    if sending.broken:
        give_up([trainer.pop("group")])
        sending.free()
    return sending


def test_all_engines_receive_it(gloo_engines):
    loop, engines, clients, trainer = gloo_engines
    sending = send(loop, clients, trainer)
    assert not sending.failed
    assert [engine.received for engine in engines] == [7.0] * 3


@pytest.mark.parametrize("bad", range(SIZE - 1))
def test_only_the_one_that_refuses_is_to_blame(gloo_engines, bad):
    loop, engines, clients, trainer = gloo_engines
    engines[bad].refuses = True
    sending = send(loop, clients, trainer)
    assert sending.failed == {f"e{bad}": 'HTTP 400: {"success": false, "message": "no"}'}
