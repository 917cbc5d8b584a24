"""Prepares one process for slime: the driver (called by entry.py) and each Ray worker (called by Ray).

Ray imports `HOOK` in every worker before anything else runs there, also in actors that have a runtime environment of
their own (Ray 2.x, `worker_process_setup_hook`).
"""

from __future__ import annotations

from slime_backend import cpu
from slime_backend.import_hooks import on_import
from slime_backend.slime_hooks import compat, log_prefix, patches, wandb_run
from slime_backend.slime_hooks.contract import checkout

HOOK = "slime_backend.slime_hooks.worker_setup.setup"


def setup() -> None:
    """Make slime importable and register everything that is changed in it. May be called again."""
    log_prefix.install()
    checkout.make_importable()
    if cpu.requested():
        cpu.install()
    compat.install()
    for module_name, patch in wandb_run.PATCHES:
        on_import(module_name, patch)
    patches.install()
