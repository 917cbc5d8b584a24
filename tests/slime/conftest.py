"""Tests on the real slime: run when SLIME_SRC names a slime checkout, in an environment of scripts/make_slime_env.sh.

Nothing is faked in them: slime's own loop, Ray, Megatron-core and SGLang, on a tiny model and the CPU. A job takes a
minute or more, so jobs with the same flags are run once and shared.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slime.jobs import DEADLINE_S, SlimeRun, job_flags, run_job


def why_not() -> str | None:
    """Why slime's tests can't run here, or None."""
    source = os.environ.get("SLIME_SRC")
    if not source:
        return "SLIME_SRC doesn't name a slime checkout"
    if not (Path(source) / "train.py").is_file():
        return f"SLIME_SRC={source} is no slime checkout: it holds no train.py"
    missing = [name for name in ("ray", "megatron.core", "sglang", "sglang_router") if not _importable(name)]
    return f"{', '.join(missing)} not installed; scripts/make_slime_env.sh installs it" if missing else None


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if reason and item.get_closest_marker("slime"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a tiny model and its prompts."""
    from slime_backend.cpu.tiny import make

    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def slime_run(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SlimeRun]:
    """`slime_run(*flags, loop="train", deadline_s=600, environment=None) -> SlimeRun`, once per set of arguments.

    In a flag's value, `{dir}` stands for the directory of the run.
    """
    known: dict[object, SlimeRun] = {}

    def run(
        *flags: str,
        loop: str = "train",
        deadline_s: float = DEADLINE_S,
        environment: dict[str, str] | None = None,
    ) -> SlimeRun:
        key = (flags, loop, deadline_s, tuple(sorted((environment or {}).items())))
        if key not in known:
            directory = tmp_path_factory.mktemp("slime")
            extra = [flag.replace("{dir}", str(directory)) for flag in flags]
            known[key] = run_job(
                f"slime_backend.slime_hooks.{loop}",
                job_flags(tiny_flags, directory, extra),
                directory,
                deadline_s=deadline_s,
                environment=environment,
            )
        return known[key]

    return run
