"""What is changed in slime's modules so that every publication goes through our transaction."""

from __future__ import annotations

import os

from slime_backend.import_hooks import ModuleFunction, on_import
from slime_backend.slime_hooks.engines import engine, servers
from slime_backend.slime_hooks.rollouts import functions as rollouts
from slime_backend.slime_hooks.weights import delta_disk, publication_rows, saved_weights, train_group, updaters

# "off" leaves slime's own publications as they are: the negative control of tests and benchmarks.
VARIABLE = "REEF_SLIME_PUBLICATIONS"

# (slime module, function that changes it), in order.
PUBLICATIONS: tuple[tuple[str, ModuleFunction], ...] = (
    *engine.PATCHES,
    *servers.PATCHES,
    *updaters.PATCHES,
    *delta_disk.PATCHES,
    *train_group.PATCHES,
    *publication_rows.PATCHES,
)
ROLLOUTS: tuple[tuple[str, ModuleFunction], ...] = (*rollouts.PATCHES, *saved_weights.PATCHES)
PATCHES = (*PUBLICATIONS, *ROLLOUTS)


def install() -> None:
    """Register every patch; each runs when its module is imported."""
    for module_name, patch in ROLLOUTS if os.environ.get(VARIABLE) == "off" else PATCHES:
        on_import(module_name, patch)
