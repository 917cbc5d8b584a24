"""Every lock holds what the core imports: an environment that is made of one alone runs a controller."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = [ROOT / "requirements" / name for name in ("cpu.lock", "compat.lock", "compat-0.5.17.lock")]


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[\w.-]+", line) for line in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match}


CORE = names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_what_the_core_depends_on(lock: Path):
    assert len(CORE) >= 5
    assert CORE - names(lock.read_text().splitlines()) == set()


def test_control_a_package_that_leaves_a_lock_is_missed():
    kept = [line for line in LOCKS[0].read_text().splitlines() if not line.startswith("httptools==")]
    assert CORE - names(kept) == {"httptools"}
