"""The trainer's thread and the event loop share what waits in a collective transport: only the loop looks at it."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.event_loop import LoopThread
from slime_backend.transports.base import TransportError
from slime_backend.transports.collective import CollectiveTransport, _Waiting

ENGINES = 200


def client(name: str) -> Any:
    """What stands for an EngineClient."""
    return SimpleNamespace(name=name)


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
                transport._waiting[f"e{number}"] = _Waiting(client(f"e{number}"), running.create_future())
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
            transport._waiting[name] = _Waiting(client(name), asyncio.get_running_loop().create_future())
        transport._waiting["late"].sent.cancel()

    loop.submit(two()).result(30)
    assert transport.settle({"b": "it said no"}, done=False) == ["a"]  # not the one whose deadline came first
    with pytest.raises(TransportError, match="it said no"):
        raise loop.ask(lambda: transport._waiting["b"].sent.exception())
    assert transport.settle({}, done=True) == []
    assert loop.ask(lambda: transport._waiting["a"].sent.result()) is None
