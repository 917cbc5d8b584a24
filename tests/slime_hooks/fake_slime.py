"""The few modules of slime that our rollout functions import, so that they run without slime."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest


def load_function(path: str):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.fixture
def fake_slime(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Installs them; the rows that slime's logger was given."""
    logged: list[dict[str, float]] = []
    contents: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.misc": {"load_function": load_function},
        "slime.observability": {},
        "slime.observability.logging_utils": {"log": lambda args, metrics, step_key: logged.append(metrics)},
        "slime.observability.metric_utils": {"compute_rollout_step": lambda args, rollout_id: rollout_id},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return logged
