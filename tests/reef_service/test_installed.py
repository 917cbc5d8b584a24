"""The lock of `make env` holds what the gateway's tests need: without it, none of them is collected."""

from __future__ import annotations

import re
from pathlib import Path

from tests.reef_service.conftest import NEEDED

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "cpu.lock"


def locked(text: str) -> set[str]:
    """The packages of a lock, named as they are imported."""
    return {name.lower().replace("-", "_") for name in re.findall(r"^([\w.-]+)==", text, flags=re.MULTILINE)}


def test_the_lock_has_what_the_gateways_tests_need():
    assert set(NEEDED) <= locked(LOCK.read_text())


def test_control_a_package_that_leaves_the_lock_is_missed():
    lines = LOCK.read_text().splitlines()
    for name in NEEDED:
        kept = [line for line in lines if locked(line) != {name}]
        assert set(NEEDED) - locked("\n".join(kept)) == {name}
