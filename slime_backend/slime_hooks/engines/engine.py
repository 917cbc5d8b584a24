"""slime's engine actor (SGLangEngine): started with our hooks, and in the router only once a publication confirmed it.

What it is asked to do to the weights, the publisher asks of the engine itself, over HTTP.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

from slime_backend.arguments import policy_of
from slime_backend.engine_process import RUN_HOOKS, plugin_entry
from slime_backend.errors import ReefError
from slime_backend.import_hooks import ModuleFunction
from slime_backend.policy import Policy
from slime_backend.slime_hooks.engines import local_checkpoint, router
from slime_backend.wire import HOOKS_VARIABLE

log = logging.getLogger(__name__)

CPU_HOOK = "cpu_attention"
# Of an engine's settings, those that differ between any two engines that slime starts at once.
IDENTITY = ("model_path", "random_seed", "nccl_port")


class WrongEngineError(ReefError, RuntimeError):
    """Another server answers at the address of the engine that was started."""


def hooks_for(policy: Policy, device: str | None) -> str:
    """REEF_SLIME_HOOKS of a run's engines."""
    wanted = dict.fromkeys((*RUN_HOOKS, *policy.needed_hooks))
    if device != "cpu":
        wanted.pop(CPU_HOOK, None)
    return ",".join(wanted)


def check_identity(started: dict[str, Any], answering: dict[str, Any], url: str) -> None:
    """Raise WrongEngineError unless the server at `url` is the one that was started with these arguments.

    slime takes any answer for a sign of health, also that of another engine on the same port.
    """
    for name in IDENTITY:
        if name == "model_path" and _is_downloaded(started.get(name), answering.get(name)):
            continue
        if name in started and name in answering and started[name] != answering[name]:
            raise WrongEngineError(
                f"the server at {url} is another one: its {name} is {answering[name]!r}, this engine was started with "
                f"{started[name]!r}; two engines were given one port, or something else listens there"
            )


def _is_downloaded(asked: Any, answered: Any) -> bool:
    """Whether SGLang has put the directory that it downloaded a model to in the place of the model's name on a hub, as
    it does for ModelScope (SGLANG_USE_MODELSCOPE; 0.5.23, server_args.py)."""
    return not Path(str(asked)).exists() and Path(str(answered)).is_dir()


def _engine(module: Any) -> None:
    engine: Any = module.SGLangEngine
    start, register, pull = engine._init_normal, engine._register_to_router, engine.pull_weights

    @functools.wraps(start)
    def _init_normal(self: Any, server_args_dict: dict[str, Any]) -> None:
        plugin_entry.require()  # this node's Python may be another than the driver's
        # The server is a child of this actor; what the user has set stays.
        os.environ.setdefault(
            HOOKS_VARIABLE, hooks_for(policy_of(self.args), getattr(self.args, "sglang_device", None))
        )
        start(self, server_args_dict)
        if self.node_rank == 0 and self.worker_type != "encoder":
            try:
                check_identity(server_args_dict, module.get_server_info(_url(self)), _url(self))
            except WrongEngineError:
                module.kill_process_tree(self.process.pid)
                raise

    @functools.wraps(register)
    def _register_to_router(self: Any, server_args_dict: dict[str, Any]) -> None:
        """Not yet: `reef_route` does it."""
        self.reef_registration = server_args_dict

    def reef_route(self: Any) -> None:
        """Register with the router, as slime does, and return once the router sends requests here."""
        register(self, self.reef_registration)
        if (address := _router(self)) and self.node_rank == 0 and self.worker_type != "encoder":
            router.wait_listed(address, _url(self))

    def reef_address(self: Any) -> tuple[str, str | None]:
        """Base URLs of this engine and of its router."""
        return _url(self), _router(self)

    @functools.wraps(engine.pause_generation)
    def pause_generation(self: Any) -> Any:
        """In the mode that the policy prescribes; slime's own is always abort."""
        return self._make_request("pause_generation", {"mode": policy_of(self.args).pause_mode})

    @functools.wraps(pull)
    def pull_weights(self: Any, target_version: int) -> Any:
        """By the engine, where its SGLang has slime's patch; here, where it hasn't."""
        try:
            return pull(self, target_version)
        except module.requests.exceptions.HTTPError as error:
            if error.response is None or error.response.status_code != 404:
                raise
        local_checkpoint.pull(
            self.args.update_weight_local_checkpoint_dir,
            base=self.sglang_overrides.get("model_path", self.args.hf_checkpoint),
            source=self.args.update_weight_disk_dir,
            target=target_version,
        )
        return None

    for method in (_init_normal, _register_to_router, reef_route, reef_address, pause_generation, pull_weights):
        setattr(engine, method.__name__, method)


def _url(engine: Any) -> str:
    return f"http://{engine.server_host}:{engine.server_port}"


def _router(engine: Any) -> str | None:
    return f"http://{engine.router_ip}:{engine.router_port}" if engine.router_ip and engine.router_port else None


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (("slime.backends.sglang_utils.sglang_engine", _engine),)
