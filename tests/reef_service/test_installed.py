"""Says which package the gateway's tests are left out for."""

from __future__ import annotations

import pytest

from tests.reef_service.conftest import MISSING


def test_what_the_gateway_needs_is_installed():
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} not installed: the gateway's tests are left out; make env installs them")
