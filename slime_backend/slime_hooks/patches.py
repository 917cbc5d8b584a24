"""What is changed in slime's modules so that every publication goes through our transaction."""

from __future__ import annotations

from slime_backend.post_import import ModuleFunction, on_import
from slime_backend.slime_hooks import engine, rollouts, saved_weights, servers, train_group, updaters

# (slime module, function that changes it), in order.
PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    *engine.PATCHES,
    *servers.PATCHES,
    *updaters.PATCHES,
    *train_group.PATCHES,
    *rollouts.PATCHES,
    *saved_weights.PATCHES,
)


def install() -> None:
    """Register every patch; each runs when its module is imported."""
    for module_name, patch in PATCHES:
        on_import(module_name, patch)
