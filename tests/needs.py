"""Marks of tests that need what only an environment of their own has."""

from __future__ import annotations

import importlib.util

import pytest

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed; make test-deepspeed installs it"
)
