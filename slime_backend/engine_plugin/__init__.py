"""What reef-slime adds inside an SGLang process (entry point group `sglang.srt.plugins`).

`register` runs in every process that SGLang starts. It reads one variable, `REEF_SLIME_HOOKS`, and without it returns
before anything else is imported, so an engine that was not started for us stays as it was. A hook that cannot be
installed never takes the server down: the reason stands in the report that a controller reads, and the controller is
the one to refuse.

    hook           file               changes
    cpu_attention  cpu_attention.py   attention on a CPU: right for sliding windows, fast for prefix hits and batches
    kv_evidence    kv_evidence.py     /server_info: what each scheduler counted itself; when weights change it waits for
                                      the device (device_fence.py) and drops image features (image_features.py)
    kv_spans       kv_spans.py        meta_info: which weights sampled each token, and which computed its context
    kv_stamps      kv_stamps.py       meta_info: measures by stamps on the slots what kv_spans claims
    scope          scope.py           radix-cache keys: the weight epoch; sweeps older entries at a publication
    swa_anchors    swa_anchors.py     radix cache: keeps a sliding window where prompts may diverge
    paused_sleep   paused_sleep.py    lets a paused scheduler sleep until the next message
    retract_frees  retract_frees.py   gives the KV slots of all retracted requests back at once
    retract_flush  retract_flush.py   lets a flush through after a retract pause, where SGLang refuses it
    grammar_flush  grammar_flush.py   lets a flush through while requests wait for their grammars
    sampled_spans  sampled_spans.py   meta_info: which weights sampled each token, where SGLang doesn't report it
    hook_switch    hook_switch.py     takes the others out of a running engine and puts them back, for a bench
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable

from slime_backend import wire

# Hook name -> module with `install() -> str`, which returns `wire.ACTIVE`, `wire.NOT_NEEDED`, or why the hook is not
# active (yet).
HOOK_MODULES: dict[str, str] = {
    "cpu_attention": "slime_backend.engine_plugin.cpu_attention",
    "kv_evidence": "slime_backend.engine_plugin.kv_evidence",
    "kv_spans": "slime_backend.engine_plugin.kv_spans",
    "kv_stamps": "slime_backend.engine_plugin.kv_stamps",
    "scope": "slime_backend.engine_plugin.scope",
    "swa_anchors": "slime_backend.engine_plugin.swa_anchors",
    "paused_sleep": "slime_backend.engine_plugin.paused_sleep",
    "retract_frees": "slime_backend.engine_plugin.retract_frees",
    "retract_flush": "slime_backend.engine_plugin.retract_flush",
    "grammar_flush": "slime_backend.engine_plugin.grammar_flush",
    "sampled_spans": "slime_backend.engine_plugin.sampled_spans",
    "hook_switch": "slime_backend.engine_plugin.hook_switch",
}

log = logging.getLogger(__name__)


class UnknownHookError(ValueError):
    """A hook is asked for that this version does not have."""


def requested_hooks() -> tuple[str, ...]:
    """Hook names in `REEF_SLIME_HOOKS`, in order, each once.

    Raises UnknownHookError before anything is installed: a misspelt hook is a hook that would be missed silently.
    """
    names = dict.fromkeys(name.strip() for name in os.environ.get(wire.HOOKS_VARIABLE, "").split(",") if name.strip())
    check_names(names, wire.HOOKS_VARIABLE)
    return tuple(names)


def check_names(names: Iterable[str], where: str) -> None:
    """Raise UnknownHookError where a name is no hook's; `where` says who gave them."""
    unknown = [name for name in names if name not in HOOK_MODULES]
    if unknown:
        raise UnknownHookError(
            f"{where} names unknown hooks: {', '.join(unknown)}; known are {', '.join(HOOK_MODULES)}"
        )


def register() -> None:
    """Entry point: install the hooks that `REEF_SLIME_HOOKS` names."""
    names = requested_hooks()
    if not names:
        return
    from slime_backend.engine_plugin import registry, start_log

    start_log.install()
    for name in names:
        try:
            status = importlib.import_module(HOOK_MODULES[name]).install()
        except Exception as error:  # any fault of one hook: reported, and left to the controller to judge
            log.exception("reef-slime hook %s could not be installed", name)
            status = f"{type(error).__name__}: {error}"
        registry.set_status(name, status)
        log.info("reef-slime hook %s: %s", name, status)
