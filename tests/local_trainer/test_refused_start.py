"""A start that is refused leaves no run directory; a run that began keeps what it wrote."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slime_backend.config import make_config
from slime_backend.engine_process import EngineStartError
from slime_backend.errors import RunError, RunMisused
from slime_backend.local_trainer import loop
from slime_backend.run_files import RunDir
from slime_backend.simulation.models import ModelError


@pytest.fixture
def start(tmp_path: Path, run_async):
    """`start(**keys)` begins a run of this configuration in `tmp_path/"run"`."""

    def run(**keys):
        given = {"audit_rollouts": 0, "models_dir": str(tmp_path / "models"), "tracker": "wandb", **keys}
        reporter = loop.Reporter(say=lambda text: None)
        config = make_config(given, "test")
        return run_async(loop.train(config, tmp_path / "run", resume=False, reporter=reporter), timeout=300)

    return run


def broken_model(tmp_path: Path) -> str:
    """A directory with a config.json and no weights."""
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    return str(directory)


def test_a_missing_model_leaves_nothing(start, tmp_path):
    with pytest.raises(RunMisused, match="model='no/model' is neither"):
        start(model="no/model")
    assert not (tmp_path / "run").exists()


def test_missing_deepspeed_leaves_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RunError, match=r"pip install 'reef-slime\[deepspeed\]'"):
        start(model="tiny", trainer="deepspeed")
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_load_leaves_nothing(start, tmp_path):
    """This is seen behind the lock, which lies in the run's directory."""
    with pytest.raises(ModelError, match="does not load"):
        start(model=broken_model(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_directory_that_was_there_stays(start, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ModelError, match="does not load"):
        start(model=broken_model(tmp_path))
    assert (tmp_path / "run").is_dir()


def test_a_run_that_began_keeps_what_it_wrote(start, tmp_path, monkeypatch):
    @asynccontextmanager
    async def no_engines(config, policy, model, version, log_dir, say):
        RunDir(log_dir).engine_log(0).write_text("why")
        raise EngineStartError("engine0: the engine ended while starting")
        yield

    monkeypatch.setattr(loop, "running_fleet", no_engines)
    with pytest.raises(EngineStartError):
        start(model="tiny", tracker="none")
    run = RunDir(tmp_path / "run")
    assert run.engine_log(0).read_text() == "why"
    assert run.weights("v0").is_dir()
