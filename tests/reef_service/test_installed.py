"""Holds the environment of `make env` against what the gateway's tests need, so that none is left out there unseen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.reef_service.conftest import MISSING


def test_the_locked_environment_has_what_the_gateway_needs():
    if not (Path(sys.prefix) / ".reef-slime-lock").is_file():
        pytest.skip("this environment was not made by make env, so what it lacks is its owner's choice")
    assert MISSING == []
