"""Fake engines behind a fake router with the publisher inside slime, for the tests of all ways of publishing."""

from __future__ import annotations

from contextlib import contextmanager

from slime_backend.event_loop import LoopThread
from slime_backend.policy import decide
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.slime_hooks.weights.publisher import SlimePublisher
from tests.fake_fleet import FAST
from tests.slime_hooks.fake_router import FakeRouter


class StubEngine:
    """Stands for slime's engine actor: a fake engine, and what the publisher may ask the actor."""

    def __init__(self, fake, router, key):
        self.fake, self.fake_router, self.key = fake, router, key
        self.url, self.router = fake.url, router.url
        self.discarded = False

    def route(self):
        # What a request would be answered with, from the first moment that it can come here.
        self.label_when_routed = self.fake.label
        self.fake_router.add(self.url)

    def discard(self):
        self.discarded = True


@contextmanager
def engines_and_publisher(tmp_path, count=2, sharing="retract", version="0", discard=False, **engine):
    servers = LoopThread()
    policy = decide("disjoint", sharing)
    router = FakeRouter()
    fakes = [FakeEngine(version="default", radix_cache=policy.radix_cache, **engine) for _ in range(count)]
    for fake in fakes:
        servers.submit(fake.start()).result()
    publisher = SlimePublisher(policy, version, run_dir=tmp_path, deadlines=FAST, discard_retired=discard)
    try:
        yield publisher, [StubEngine(fake, router, f"actor{i}") for i, fake in enumerate(fakes)], router
    finally:
        publisher.close()
        for fake in fakes:
            servers.submit(fake.stop()).result()
        servers.stop()
        router.stop()
