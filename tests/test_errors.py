"""Every error class of ours has the one base that the command line catches."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import reef_service
import slime_backend
from slime_backend.config import ConfigError
from slime_backend.engine_client import EngineError, EngineRefused
from slime_backend.errors import EngineFault, ReefError, RunError, RunMisused, UsageError
from slime_backend.fleet.membership import VersionTaken, VersionUnnamed
from slime_backend.planner.measured import MeasurementsMissing
from slime_backend.planner.traffic import PlanError
from slime_backend.policy import PolicyError
from slime_backend.publication import NotConfirmed
from slime_backend.transports import TransportError

# Inside SGLang's processes nothing of ours but the plugin and wire.py is imported; whoever calls them says it in a
# ReefError. _Unanswered never leaves its module.
APART = {"UnknownHookError", "AnchorError", "WireError", "_Unanswered", "Refused"}


def error_classes() -> Iterator[type[BaseException]]:
    for package in (slime_backend, reef_service):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                found = importlib.import_module(module.name)
            except ImportError:  # needs a package that this environment lacks (slime, deepspeed)
                continue
            for value in vars(found).values():
                if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == module.name:
                    yield value


def test_every_error_has_the_base_that_the_command_line_catches():
    found = list(error_classes())
    assert len(found) > 40
    assert [c.__qualname__ for c in found if not issubclass(c, ReefError) and c.__name__ not in APART] == []


def test_wrong_use_exits_with_2_and_everything_else_with_1():
    usage = {c for c in error_classes() if issubclass(c, ReefError) and c.exit_code == 2}
    assert usage == {
        UsageError,
        ConfigError,
        MeasurementsMissing,
        PlanError,
        PolicyError,
        RunMisused,
        VersionUnnamed,
    }
    assert issubclass(RunMisused, RunError)
    assert issubclass(VersionUnnamed, VersionTaken)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineError("e0", "POST /flush_cache", "no answer within 5 s"), "e0: POST /flush_cache: no answer within 5 s"),
        (EngineRefused("e0", "GET /x", "HTTP 503: busy", status=503), "e0: GET /x: HTTP 503: busy"),
        (NotConfirmed("e0", "rank 0 isn't paused"), "e0: rank 0 isn't paused"),
        (TransportError("e0", "it didn't join"), "e0: it didn't join"),
    ],
)
def test_what_an_engine_did_has_engine_and_words_apart(error: EngineFault, text: str):
    assert str(error) == text
    assert error.engine == "e0"
    assert text.endswith(error.seen)
    assert error.status == (503 if isinstance(error, EngineRefused) else None)
