"""Which hooks of this process are active, and the one way in which they attach to SGLang.

A hook is a `Plan`: the functions that it attaches and the names that it uses (names.py). It is attached as one, with a
guard around each function (guard.py), where this SGLang has them all; otherwise its status is what is lacking.

SGLang applies hooks after all plugins have run and only logs a hook that it failed to apply
(0.5.23, plugins/hook_registry.py:135-146), so `statuses` looks at what was really patched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import guard, names
from slime_backend.engine_plugin.guard import Kind
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang

HookFunction = tuple[str, Kind, Callable[..., Any]]  # dotted SGLang name, when, what

log = logging.getLogger(__name__)
MOST_NAMES = 3  # of those that are lacking, in a status

_statuses: dict[str, str] = {}
_faults: dict[str, str] = {}  # the first of each hook
_targets: dict[str, list[str]] = {}
_attached: dict[HookFunction, list[str]] = {}  # -> the hooks that need it: some share their listeners


@dataclass(frozen=True, slots=True)
class Plan:
    """What a hook attaches to one release of SGLang, and what its functions use there."""

    functions: tuple[HookFunction, ...] = ()
    uses: tuple[Need, ...] = ()
    instead: str = ""  # the status where nothing is to be attached: `wire.NOT_NEEDED`, or why the hook can't be had

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.functions + other.functions, self.uses + other.uses, self.instead or other.instead)

    def status(self, sglang: Sglang) -> str:
        """`wire.ACTIVE`, `wire.NOT_NEEDED`, or what this release lacks."""
        if self.instead:
            return self.instead
        missing = names.missing(sglang, [*(target for target, _, _ in self.functions), *self.uses])
        if missing:
            more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
            return f"this SGLang has no {', '.join(missing[:MOST_NAMES])}{more}"
        return "; ".join(_misfits(sglang, self.functions)) or wire.ACTIVE


def _misfits(sglang: Sglang, functions: Iterable[HookFunction]) -> list[str]:
    found = []
    for target, kind, function in functions:
        parameters = sglang.parameters(target)
        why = None if parameters is None else names.misfit(parameters, function, skipped=0 if kind == "before" else 1)
        if why is not None:
            found.append(f"this SGLang's {target} has {why}")
    return found


def set_status(hook: str, status: str) -> None:
    """Record `wire.ACTIVE` or why the hook is not active. A status that a hook set itself later replaces this one."""
    _statuses[hook] = status


def statuses() -> dict[str, str]:
    """Hook name -> "active", "not needed", or why it is neither."""
    found = dict(_statuses)
    for hook, targets in _targets.items():
        unpatched = [target for target in targets if not _is_patched(target)]
        if found.get(hook) == wire.ACTIVE and unpatched:
            found[hook] = f"SGLang did not apply it to {', '.join(unpatched)}; see the engine's log"
    return {**found, **_faults}


def faults() -> dict[str, str]:
    """Hook name -> what its code raised first in this process."""
    return dict(_faults)


def report_fault(hooks: Iterable[str], where: str, error: Exception) -> None:
    """A hook's code raised: that is its status from now on, since what it missed can't be known."""
    for hook in hooks:
        if hook not in _faults:
            log.error("reef-slime hook %s failed in %s; SGLang goes on without it", hook, where, exc_info=error)
            _faults[hook] = f"{wire.FAILED}{where}: {type(error).__name__}: {error}"


def hooks_at(target: str) -> list[str]:
    """The hooks that are attached to one name of SGLang's."""
    return [hook for hook, targets in _targets.items() if target in targets]


def missing_targets(targets: Sequence[str]) -> list[str]:
    """Dotted SGLang names that this version does not have."""
    return names.missing(IMPORTED, targets)


def install(hook: str, plan: Plan) -> str:
    """Attach a hook where this SGLang has all that it uses. Returns its status."""
    status = plan.status(IMPORTED)
    if status == wire.ACTIVE:
        for function in plan.functions:
            _register(hook, function)
    return status


def attach(hook: str, functions: Sequence[HookFunction]) -> str:
    """Register `functions` as (target, kind, function) for `hook`, all of them or none.

    Returns `wire.ACTIVE`, or which target this SGLang lacks.
    """
    return install(hook, Plan(tuple(functions)))


def _register(hook: str, attached: HookFunction) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target, kind, function = attached
    _targets.setdefault(hook, []).append(target)
    hooks = _attached.setdefault(attached, [])
    hooks.append(hook)
    if len(hooks) == 1:
        protected = guard.guarded(kind, function, lambda error: report_fault(hooks, target, error))
        HookRegistry.register(target, protected, HookType(kind))


def targets_but(hooks: Sequence[str]) -> list[str]:
    """Every dotted SGLang name that was patched, each once, but for those of `hooks`."""
    found = dict.fromkeys(t for hook, targets in _targets.items() if hook not in hooks for t in targets)
    return [target for target in found if _is_patched(target)]


def _is_patched(target: str) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return target in HookRegistry._patched
