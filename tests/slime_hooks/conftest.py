"""Fixtures of the tests of slime's hooks."""

from tests.slime_hooks.fake_slime import fake_slime  # noqa: F401
from tests.slime_hooks.stub_ray import stub_ray  # noqa: F401
