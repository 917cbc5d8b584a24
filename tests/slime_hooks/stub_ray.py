"""Stubs of Ray and of slime's engine actor."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    pass


@pytest.fixture
def stub_ray(monkeypatch):
    """A reference is a function; `get` calls it."""
    ray: Any = ModuleType("ray")
    ray.exceptions = SimpleNamespace(RayError=RayError)
    ray.put = lambda value: lambda: value

    def get(reference, timeout=None):
        return [get(r) for r in reference] if isinstance(reference, list) else reference()

    ray.get, ray.kill = get, lambda actor: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


class StubMethod:
    def __init__(self, function):
        self.function = function

    def remote(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        return lambda: result


class StubActor:
    """slime's engine actor: what reached it is in `calls`."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []
        self._actor_id = SimpleNamespace(hex=lambda: engine.key)

    def __getattr__(self, name):
        if name == "reef_address":
            return StubMethod(lambda: (self.engine.url, self.engine.router))
        if name == "reef_route":
            return StubMethod(self.engine.route)
        return StubMethod(lambda *args, **kwargs: self.calls.append(name))
