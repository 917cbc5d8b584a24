"""What the older SGLang generation lacks. Tests with an engine run in the environment of `make test-compat`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def older_generation() -> None:
    """Skip where SGLang does by itself what these tests need our hooks for."""
    from slime_backend.engine_plugin import generation

    if generation.flushes_while_paused() and generation.reports_sampled_spans():
        pytest.skip(
            "this SGLang flushes after a retract and reports sampled spans by itself; make test-compat installs one "
            "that doesn't and runs these tests on it"
        )
