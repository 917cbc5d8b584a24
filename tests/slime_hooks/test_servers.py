"""Ports across models, and which engines are routed at once. slime's ServerGroup is a stub that allocates as slime's:
from the highest cursor it is given, else from 15000."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_backend.slime_hooks.engines import servers
from slime_backend.slime_hooks.engines.servers import PortCursor, frozen

FIRST, PER_ENGINE = 15000, 35


class StubActor:
    def __init__(self, log):
        self.reef_route = SimpleNamespace(remote=lambda: log.append(self) or "routed")


def slime_module(models, log):
    """A module with slime's names: each model starts its groups with fresh cursors, as slime does."""

    class ServerGroup:
        def __init__(self):
            self.all_engines = [StubActor(log)]

        def start_engines(self, port_cursors=None):
            self.port = max(port_cursors.values()) if port_cursors else FIRST
            return ["init"], {0: self.port + PER_ENGINE}

    module = SimpleNamespace(ServerGroup=ServerGroup)

    def start_rollout_servers(args, pg):
        found = {}
        for name, (groups, updates) in models.items():
            cursors, made = {}, []
            for _ in range(groups):
                group = module.ServerGroup()
                _, cursors = group.start_engines(cursors)
                made.append(group)
            engines = [engine for group in made for engine in group.all_engines]
            found[name] = SimpleNamespace(server_groups=made, update_weights=updates, all_engines=engines)
        return found, ["init"]

    module.start_rollout_servers = start_rollout_servers
    return module


def ports(found):
    return [group.port for server in found.values() for group in server.server_groups]


TWO_MODELS = {"actor": (2, True), "reward": (1, False)}


def test_slime_alone_gives_two_models_the_same_ports():
    found, _ = slime_module(TWO_MODELS, []).start_rollout_servers(None, None)
    assert len(set(ports(found))) < len(ports(found))


def test_every_engine_of_every_model_has_ports_of_its_own():
    module = slime_module(TWO_MODELS, [])
    servers._servers(module)
    found, _ = module.start_rollout_servers(SimpleNamespace(debug_rollout_only=False), None)
    assert ports(found) == [FIRST, FIRST + PER_ENGINE, FIRST + 2 * PER_ENGINE]


def test_a_recovered_engine_starts_counting_where_slime_does():
    """Ports of running engines are in use by then, so nothing has to be carried; else they would climb for ever."""
    module = slime_module(TWO_MODELS, [])
    servers._servers(module)
    found, _ = module.start_rollout_servers(SimpleNamespace(debug_rollout_only=False), None)
    group = found["actor"].server_groups[0]
    group.start_engines({})
    assert group.port == FIRST


def test_cursors_of_several_nodes():
    cursor = PortCursor()
    with cursor:
        cursor.note({0: 15035, 1: 15070})
        assert cursor.carry({}) == {0: 15070}
        assert cursor.carry({0: 15100, 1: 15010}) == {0: 15100, 1: 15070}
    assert cursor.carry({}) == {}


@pytest.mark.parametrize(("rollout_only", "routed"), [(False, {"reward", "ref"}), (True, {"actor", "reward", "ref"})])
def test_engines_that_no_publication_reaches_are_routed_at_once(rollout_only, routed):
    log = []
    module = slime_module({"actor": (1, True), "reward": (1, False), "ref": (1, True)}, log)
    servers._servers(module)
    found, handles = module.start_rollout_servers(SimpleNamespace(debug_rollout_only=rollout_only), None)
    assert {name for name, server in found.items() if set(server.all_engines) & set(log)} == routed
    assert handles == ["init"] + ["routed"] * len(routed)


def test_slime_updates_only_the_first_updatable_model():
    one, two, three = (SimpleNamespace(update_weights=u) for u in (False, True, True))
    assert frozen({"a": one, "b": two, "c": three}) == [one, three]
