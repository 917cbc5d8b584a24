"""This hook takes the others out of a running scheduler and puts them back.

It serves `reef-slime bench overhead` alone: no run and no policy asks for it, and an engine that wasn't started with
its name in REEF_SLIME_HOOKS never loads it.

Two engine processes that are started alike differ in speed by more than recording costs, so the bench compares one
engine with itself. `POST /set_internal_state` with `{"server_args": {"reef_slime_hooks": 0}}` puts SGLang's own
functions back where the hooks were attached (and its own output streamer), and 1 the hooked ones. Only between
requests: one that was admitted without the hooks has no record. What stays: `cpu_attention`, which isn't a part of
recording; control calls, which the scheduler bound at its start (reports, pause, flush); and what the HTTP process does
once per request.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
import types
from dataclasses import dataclass
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import kv_spans, registry
from slime_backend.engine_plugin.generation import SCHEDULER
from slime_backend.engine_plugin.names import IMPORTED, Sglang
from slime_backend.engine_plugin.registry import Plan

HOOK = "hook_switch"
KEPT = (HOOK, "cpu_attention")
USES = (
    "sglang.srt.managers.io_struct.SetInternalStateReq.server_args",
    "sglang.srt.managers.io_struct.SetInternalStateReqOutput.updated",
    f"{SCHEDULER}.output_streamer",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A class or module that holds a hooked function under `name`."""

    owner: Any
    name: str
    hooked: Any
    plain: Any  # SGLang's own


def install() -> str:
    return registry.install(HOOK, plan(IMPORTED))


def plan(sglang: Sglang) -> Plan:
    return Plan(((f"{SCHEDULER}.set_internal_state", "around", _around_set),), USES)


def places_of(target: str, hooks: int) -> list[Place]:
    """Where the function `target`, wrapped by `hooks` hooks, is bound: its owner, and modules that imported it."""
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    hooked = plain = vars(owner)[name]
    for _ in range(hooks):
        plain = plain.__wrapped__
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    bound = [(module, key) for module in modules for key, value in list(vars(module).items()) if value is hooked]
    return [Place(holder, key, hooked, plain) for holder, key in dict.fromkeys([(owner, name), *bound])]


def switch(places: list[Place], on: bool) -> None:
    for place in places:
        setattr(place.owner, place.name, place.hooked if on else place.plain)


@functools.cache  # the first call comes while the hooks are in
def _places() -> list[Place]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = registry.targets_but(KEPT)
    return [place for target in targets for place in places_of(target, len(HookRegistry._hooks[target]))]


def _streamer_class(current: Any, on: bool) -> type:
    """SGLang's own class of output streamer, or the one that kv_spans puts in its place."""
    plain = current.__mro__[1] if current.__module__ == kv_spans.__name__ else current
    return kv_spans.reporting_streamer(plain) if on else plain


def _around_set(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    if set(recv_req.server_args) != {wire.SWITCH_KEY}:
        return original(scheduler, recv_req, *args, **kwargs)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    on = bool(recv_req.server_args[wire.SWITCH_KEY])
    switch(_places(), on)
    if registry.statuses().get(kv_spans.HOOK) == wire.ACTIVE:
        streamer = scheduler.output_streamer
        streamer.__class__ = _streamer_class(type(streamer), on)
    return SetInternalStateReqOutput(updated=True)
