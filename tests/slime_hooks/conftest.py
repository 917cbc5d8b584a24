"""Fixtures of the tests of slime's hooks."""

from .fake_slime import fake_slime  # noqa: F401
