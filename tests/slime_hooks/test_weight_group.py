"""The watched broadcast, on fake engines. The process group is a stub whose works complete when the test says so; that
a real group frees its engines is shown in tests/slime."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from slime_backend.engine_client import EngineClient
from slime_backend.event_loop import LoopThread
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.slime_hooks.weights import weight_group
from slime_backend.slime_hooks.weights.weight_group import Sending

from ..fake_fleet import FAST

TENSORS = [("1", torch.zeros(4)), ("other", torch.zeros(2, 2))]


class StubWork:
    def __init__(self, group):
        self.group = group

    def is_completed(self):
        return self.group.joined

    def wait(self):
        assert self.group.joined
        if self.group.error:
            raise self.group.error


@pytest.fixture
def two_engines(monkeypatch):
    """Two fake engines with open sessions, their clients, and a group that every engine has joined."""
    group = SimpleNamespace(joined=True, sent=0, error=None)

    def broadcast(tensor, source, *, group, async_op):
        group.sent += 1
        return StubWork(group)

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    monkeypatch.setattr(weight_group, "FREED_S", 1.0)
    loop = LoopThread()
    fakes = [FakeEngine(), FakeEngine()]
    for fake in fakes:
        loop.submit(fake.start()).result()
        fake.session_open = True
    clients = {f"e{i}": EngineClient(fake.url, name=f"e{i}", deadlines=FAST) for i, fake in enumerate(fakes)}
    yield loop, fakes, clients, group
    for fake in fakes:
        loop.submit(fake.stop()).result()
    loop.stop()


def test_a_bucket_reaches_every_engine(two_engines):
    loop, fakes, clients, group = two_engines
    sending = Sending(loop, clients, 5.0)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert not sending.failed
    assert [f.loaded for f in fakes] == ["1", "1"]
    assert group.sent == 2


def test_a_refusal_ends_the_broadcast_that_nobody_joins(two_engines):
    """slime waits for the broadcast first, and looks at the answer only then: never."""
    loop, fakes, clients, group = two_engines
    group.joined = False
    fakes[1].session_open = False
    started = time.monotonic()
    sending = Sending(loop, clients, 60.0)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert sending.broken
    sending.free()
    assert time.monotonic() - started < 30
    assert list(sending.failed) == ["e1"]
    assert "must run between" in sending.failed["e1"]
    assert "/destroy_weights_update_group" in fakes[1].calls  # frees the engines that wait for it


def test_after_a_refusal_nothing_more_is_sent_in_this_round(two_engines):
    loop, fakes, clients, group = two_engines
    fakes[1].session_open = False
    sending = Sending(loop, clients, 5.0)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    sent, calls = group.sent, [list(f.calls) for f in fakes]
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    sending.take_tensors("e0", ["x"], None)
    assert group.sent == sent
    assert [f.calls for f in fakes] == calls


def test_an_engine_that_hangs_is_named_after_the_deadline(two_engines):
    loop, fakes, clients, group = two_engines
    group.joined = False
    fakes[0].faults["/update_weights_from_distributed"] = ["hang_before"]
    clients["e0"].deadlines = FAST.__class__(load=300.0)
    sending = Sending(loop, clients, 0.3)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert sending.broken
    sending.free()
    assert list(sending.failed) == ["e0"]
    assert "doesn't answer" in sending.failed["e0"]


def test_a_dead_engine_is_named(two_engines):
    loop, fakes, clients, group = two_engines
    group.joined = False
    fakes[0].dead = True
    sending = Sending(loop, clients, 60.0)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert sending.broken
    sending.free()
    assert list(sending.failed) == ["e0"]


def test_a_broadcast_that_never_ends_though_all_answered_fails_everybody(two_engines):
    loop, _, clients, group = two_engines
    group.joined = False
    sending = Sending(loop, clients, 0.3)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert sending.broken
    sending.free()
    assert sorted(sending.failed) == ["e0", "e1"]


def test_a_broadcast_that_fails_on_our_side_is_not_raised_in_the_middle_of_a_collective(two_engines):
    loop, _, clients, group = two_engines
    group.error = RuntimeError("connection closed")
    sending = Sending(loop, clients, 5.0)
    sending.broadcast("g", group, ["e0", "e1"], TENSORS, None)
    assert sending.broken
    sending.free()
    assert sorted(sending.failed) == ["e0", "e1"]
    assert "connection closed" in sending.failed["e0"]


def test_tensors_in_shared_memory(two_engines):
    loop, fakes, clients, _ = two_engines
    sending = Sending(loop, clients, 5.0)
    sending.take_tensors("e0", ["1"], "flattened_bucket")
    assert (fakes[0].loaded, sending.failed) == ("1", {})
    fakes[1].session_open = False
    sending.take_tensors("e1", ["1"], None)
    assert "must run between" in sending.failed["e1"]
