"""slime's engine actor with our changes, on a stub of SGLangEngine; the router is a fake one."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime_backend.policy import decide
from slime_backend.slime_hooks.engines import engine as engine_hooks
from slime_backend.slime_hooks.engines import router
from slime_backend.slime_hooks.engines.engine import WrongEngineError, check_identity, hooks_for
from slime_backend.wire import HOOKS_VARIABLE
from tests.slime_hooks.fake_router import FakeRouter


class HTTPError(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status)


@pytest.fixture
def module(monkeypatch):
    """slime's module, as far as it is changed. `registered`: what reached the router, in order."""
    monkeypatch.delenv(HOOKS_VARIABLE, raising=False)
    found: Any = ModuleType("sglang_engine")
    found.started, found.killed, found.posted = [], [], []
    found.answering = {}
    found.requests = SimpleNamespace(exceptions=SimpleNamespace(HTTPError=HTTPError))
    found.get_server_info = lambda url: found.answering
    found.kill_process_tree = found.killed.append

    class SGLangEngine:
        def __init__(self, sharing="off", router=None, worker_type="regular", **args):
            self.args = SimpleNamespace(disjoint_prefix_sharing=sharing, sglang_device="cpu", **args)
            self.worker_type, self.node_rank, self.sglang_overrides = worker_type, 0, {}
            self.server_host, self.server_port = "127.0.0.1", 15000
            self.router_ip, self.router_port = ("127.0.0.1", router.url.rpartition(":")[2]) if router else (None, None)
            self.process = SimpleNamespace(pid=7)
            self.fake_router = router

        def _init_normal(self, server_args_dict):
            found.started.append(os.environ[HOOKS_VARIABLE])
            self._register_to_router(server_args_dict)

        def _register_to_router(self, server_args_dict):
            self.fake_router.add(f"http://{self.server_host}:{self.server_port}")

        def pause_generation(self):
            self._make_request("pause_generation", {})

        def pull_weights(self, target_version):
            raise HTTPError(found.pull_status)

        def _make_request(self, endpoint, payload=None):
            found.posted.append((endpoint, payload))

    found.SGLangEngine = SGLangEngine
    engine_hooks._engine(found)
    return found


@pytest.fixture
def fake_router():
    running = FakeRouter()
    yield running
    running.stop()


SETTINGS = {"model_path": "m", "random_seed": 1, "nccl_port": 5}


def test_a_started_engine_has_our_hooks_and_is_not_in_the_router(module, fake_router):
    engine = module.SGLangEngine(router=fake_router, sharing="scoped")
    engine._init_normal(dict(SETTINGS))
    assert "scope" in module.started[0].split(",")
    assert fake_router.workers == []
    engine.reef_route()
    assert fake_router.workers == ["http://127.0.0.1:15000"]
    assert engine.reef_address() == ("http://127.0.0.1:15000", fake_router.url)


def test_hooks_that_the_user_asked_for_stay(module, fake_router, monkeypatch):
    monkeypatch.setenv(HOOKS_VARIABLE, "kv_evidence")
    module.SGLangEngine(router=fake_router)._init_normal(dict(SETTINGS))
    assert module.started == ["kv_evidence"]


@pytest.mark.parametrize(("device", "there"), [("cpu", True), (None, False), ("cuda", False)])
def test_attention_for_cpus_is_for_cpus(device, there):
    assert ("cpu_attention" in hooks_for(decide("disjoint", "off"), device).split(",")) is there


def test_another_server_on_the_port_is_found_and_our_own_process_ended(module, fake_router):
    """slime takes the answer of whoever listens there for its engine's."""
    module.answering = {**SETTINGS, "model_path": "the other model"}
    with pytest.raises(WrongEngineError, match="its model_path is 'the other model'"):
        module.SGLangEngine(router=fake_router)._init_normal(dict(SETTINGS))
    assert module.killed == [7]
    check_identity(SETTINGS, dict(SETTINGS), "http://x")


def test_a_model_of_a_hub_may_answer_with_its_directory(tmp_path):
    """As SGLang does with ModelScope; another directory in the place of one is another engine."""
    check_identity({"model_path": "org/model"}, {"model_path": str(tmp_path)}, "http://x")
    with pytest.raises(WrongEngineError, match="model_path"):
        check_identity({"model_path": str(tmp_path)}, {"model_path": str(tmp_path.parent)}, "http://x")
    with pytest.raises(WrongEngineError, match="model_path"):
        check_identity({"model_path": "org/model"}, {"model_path": "org/other"}, "http://x")


@pytest.mark.parametrize(("sharing", "mode"), [("off", "in_place"), ("retract", "retract"), ("scoped", "in_place")])
def test_a_pause_has_the_policys_mode(module, fake_router, sharing, mode):
    module.SGLangEngine(router=fake_router, sharing=sharing).pause_generation()
    assert module.posted == [("pause_generation", {"mode": mode})]


def test_without_the_endpoint_the_actor_pulls_by_itself(module, fake_router, monkeypatch):
    calls = []
    monkeypatch.setattr(engine_hooks.local_checkpoint, "pull", lambda local, **kw: calls.append((local, kw)))
    args = {"update_weight_local_checkpoint_dir": "l", "update_weight_disk_dir": "s", "hf_checkpoint": "b"}
    engine = module.SGLangEngine(router=fake_router, **args)
    module.pull_status = 404
    engine.pull_weights(3)
    assert calls == [("l", {"base": "b", "source": "s", "target": 3})]
    module.pull_status = 400
    with pytest.raises(HTTPError):
        engine.pull_weights(3)
    assert len(calls) == 1


def test_a_router_that_never_lists_the_engine_is_named(module, fake_router, monkeypatch):
    monkeypatch.setattr(router, "LISTED_S", 0.2)
    fake_router.healthy = False
    engine = module.SGLangEngine(router=fake_router)
    engine._init_normal(dict(SETTINGS))
    with pytest.raises(router.RouterError, match="it isn't in its list after"):
        engine.reef_route()


def test_removing_an_engine_that_is_not_there(fake_router):
    router.remove(fake_router.url, "http://127.0.0.1:1")


def test_removing_from_a_router_that_is_gone(fake_router):
    fake_router.stop()
    with pytest.raises(router.RouterError, match="didn't remove"):
        router.remove("http://127.0.0.1:9", "http://127.0.0.1:1")
