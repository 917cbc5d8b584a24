"""The trainer's thread and the event loop share what waits in a collective transport: only the loop looks at it."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from slime_backend.event_loop import LoopThread
from slime_backend.transports.base import TransportError
from slime_backend.transports.collective import CollectiveTransport, _Waiting

ENGINES = 200


class Client:
    """An EngineClient whose weight session opens once `may_open` is set."""

    def __init__(self, name):
        self.name, self.may_open, self.opening = name, asyncio.Event(), False
        self.may_open.set()

    @asynccontextmanager
    async def weight_session(self):
        self.opening = True
        await self.may_open.wait()
        yield


@pytest.fixture
def loop():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = LoopThread()
    yield thread
    thread.stop()
    sys.setswitchinterval(interval)


def test_engines_that_come_and_go_while_the_trainer_looks(loop):
    """Without the hand-over, `dictionary changed size during iteration` within some hundred looks."""
    transport = CollectiveTransport(loop, deadline_s=30.0)
    stop = threading.Event()

    async def come_and_go():
        running = asyncio.get_running_loop()
        while not stop.is_set():
            for number in range(ENGINES):
                transport._waiting[f"e{number}"] = _Waiting(Client(f"e{number}"), running.create_future())
            await asyncio.sleep(0)
            for number in range(ENGINES):
                waiting = transport._waiting.pop(f"e{number}")
                if waiting.sent.done():
                    waiting.sent.exception()
            await asyncio.sleep(0)

    moving = loop.submit(come_and_go())
    transport._ready.set()
    try:
        for _ in range(2000):
            assert len(transport.wait_ready(lambda: False)) in (0, ENGINES)
            assert len(transport.settle({"e0": "it said no"}, done=False)) in (0, ENGINES - 1)
    finally:
        stop.set()
        moving.result(30)


def test_what_is_settled_and_what_is_returned_are_the_same_engines(loop):
    transport = CollectiveTransport(loop, deadline_s=30.0)

    async def two():
        for name in ("a", "b", "late"):
            transport._waiting[name] = _Waiting(Client(name), asyncio.get_running_loop().create_future())
        transport._waiting["late"].sent.cancel()

    loop.submit(two()).result(30)
    assert transport.settle({"b": "it said no"}, done=False) == ["a"]  # not the one whose deadline came first
    with pytest.raises(TransportError, match="it said no"):
        raise loop.ask(lambda: transport._waiting["b"].sent.exception())
    assert transport.settle({}, done=True) == []
    assert loop.ask(lambda: transport._waiting["a"].sent.result()) is None


def test_a_load_that_begins_late_is_sent_to_with_the_others(loop):
    transport = CollectiveTransport(loop, deadline_s=30.0)
    first, late = Client("first"), Client("late")
    loop.ask(lambda: transport.expect_loads([first, late]))
    loading = [loop.submit(transport.load(first, "v1"))]
    while "first" not in loop.ask(lambda: list(transport._waiting)):
        pass
    assert not transport._ready.is_set()
    loading.append(loop.submit(transport.load(late, "v1")))
    assert transport.wait_ready(lambda: False) == ["first", "late"]
    transport.settle({}, done=True)
    assert [future.result(30) for future in loading] == [None, None]


def test_a_session_that_takes_long_to_open_is_not_the_trainers_fault(loop):
    """The trainer's deadline passes before it could begin: it doesn't run yet."""
    transport = CollectiveTransport(loop, deadline_s=0.05)
    first, slow = Client("first"), Client("slow")
    slow.may_open.clear()
    loop.ask(lambda: transport.expect_loads([first, slow]))
    loading = [loop.submit(transport.load(client, "v1")) for client in (first, slow)]
    with pytest.raises(TimeoutError):
        loading[0].result(6 * transport.deadline_s)  # that time has to pass
    transport.deadline_s = 30.0
    loop.call(slow.may_open.set)
    assert transport.wait_ready(lambda: False) == ["first", "slow"]
    transport.settle({}, done=True)
    assert [future.result(30) for future in loading] == [None, None]


def test_a_load_that_comes_when_the_others_are_being_sent_to_fails_alone_and_names_itself(loop):
    """It is neither taken for loaded nor left waiting for the trainer."""
    transport = CollectiveTransport(loop, deadline_s=30.0, late_s=0.05)
    first, late = Client("first"), Client("late")
    loop.ask(lambda: transport.expect_loads([first, late]))
    loading = loop.submit(transport.load(first, "v1"))
    assert transport.wait_ready(lambda: False) == ["first"]
    with pytest.raises(TransportError, match="late: its load began when the others were already being sent to"):
        loop.submit(transport.load(late, "v1")).result(30)
    transport.settle({}, done=True)
    assert loading.result(30) is None


def test_who_comes_before_the_sending_and_opens_its_session_during_it_fails_too(loop):
    transport = CollectiveTransport(loop, deadline_s=30.0, late_s=0.05)
    first, late = Client("first"), Client("late")
    late.may_open.clear()
    loop.ask(lambda: transport.expect_loads([first, late]))
    loading = loop.submit(transport.load(first, "v1"))
    assert transport._ready.wait(30)  # it is waited for no longer
    coming = loop.submit(transport.load(late, "v1"))
    while not late.opening:
        pass
    assert transport.wait_ready(lambda: False) == ["first"]
    loop.call(late.may_open.set)
    with pytest.raises(TransportError, match="its load began when the others were already being sent to"):
        coming.result(30)
    transport.settle({}, done=True)
    assert loading.result(30) is None
