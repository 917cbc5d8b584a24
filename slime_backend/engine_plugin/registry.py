"""Which hooks of this process are active, and the one way in which they attach to SGLang.

SGLang applies hooks after all plugins have run and only logs a hook that it failed to apply
(0.5.23, plugins/hook_registry.py:135-146), so `statuses` looks at what was really patched.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

from slime_backend import wire

Kind = Literal["before", "after", "around"]
HookFunction = tuple[str, Kind, Callable[..., Any]]  # dotted SGLang name, when, what

_statuses: dict[str, str] = {}
_targets: dict[str, list[str]] = {}


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
    return found


def missing_targets(targets: Sequence[str]) -> list[str]:
    """Dotted SGLang names that this version does not have."""
    missing = []
    for target in targets:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError):
            missing.append(target)
    return missing


def attach(hook: str, functions: Sequence[HookFunction]) -> str:
    """Register `functions` as (target, kind, function) for `hook`, all of them or none.

    Returns `wire.ACTIVE`, or which target this SGLang lacks.
    """
    missing = missing_targets([target for target, _, _ in functions])
    if missing:
        return f"this SGLang has no {', '.join(missing)}"
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, function in functions:
        HookRegistry.register(target, function, HookType(kind))
        _targets.setdefault(hook, []).append(target)
    return wire.ACTIVE


def targets_but(hooks: Sequence[str]) -> list[str]:
    """Every dotted SGLang name that was patched, each once, but for those of `hooks`."""
    found = dict.fromkeys(t for hook, targets in _targets.items() if hook not in hooks for t in targets)
    return [target for target in found if _is_patched(target)]


def _is_patched(target: str) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return target in HookRegistry._patched
