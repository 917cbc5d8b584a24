from __future__ import annotations

import os
from pathlib import Path

import pytest

from .fake_slime import fake_slime  # noqa: F401


@pytest.fixture(scope="session")
def slime_src() -> Path:
    """The slime checkout that SLIME_SRC names."""
    named = os.environ.get("SLIME_SRC")
    if not named:
        pytest.skip("SLIME_SRC names no slime checkout")
    return Path(named)
