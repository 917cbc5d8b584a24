"""The entry points without slime: where slime is looked for, what Ray is asked for, what a user reads when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_backend import cpu
from slime_backend.slime_hooks import compat, entry, ray_start
from slime_backend.slime_hooks.contract import checkout


@pytest.fixture
def fake_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like slime's."""
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    (tmp_path / "train.py").write_text("def train(args):\n    return args\n")
    (tmp_path / "train_async.py").write_text("x = 1\n")
    monkeypatch.setenv(checkout.VARIABLE, str(tmp_path))
    return tmp_path


def test_the_script_beside_the_package_is_loaded(fake_checkout: Path):
    assert checkout.load_script("train").train(7) == 7


def test_a_rollout_function_hears_of_the_end(monkeypatch: pytest.MonkeyPatch):
    """Where samples come from a gateway, the last of them are acknowledged after slime's loop."""
    module = types.ModuleType("own_rollout")
    heard: list[str] = []
    module.at_end = lambda args: lambda: heard.append(args.save)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rollout", module)
    args = SimpleNamespace(reef_gateway="http://g", reef_rollout_function_path="own_rollout.generate", save="here")
    entry.at_end(args)()
    assert heard == ["here"]
    del module.at_end
    entry.at_end(args)()
    entry.at_end(SimpleNamespace(reef_gateway=None))()
    assert heard == ["here"]


def test_a_relative_checkout_becomes_absolute(fake_checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(fake_checkout.parent)
    monkeypatch.setenv(checkout.VARIABLE, fake_checkout.name)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    checkout.make_importable()
    assert sys.path[0] == os.environ[checkout.VARIABLE] == str(fake_checkout)


def test_a_script_that_is_missing_or_has_no_loop_is_named(fake_checkout: Path):
    with pytest.raises(checkout.SlimeNotFoundError, match=r"train_async\.py defines no train"):
        checkout.load_script("train_async")
    (fake_checkout / "train.py").unlink()
    with pytest.raises(checkout.SlimeNotFoundError, match=r"train\.py does not exist"):
        checkout.load_script("train")


def test_a_variable_that_names_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(checkout.VARIABLE, str(tmp_path))
    with pytest.raises(checkout.SlimeNotFoundError, match="not a slime checkout"):
        checkout.root()


@pytest.mark.parametrize("module", ["train", "train_async"])
def test_without_slime_the_user_reads_one_line(module: str, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in (checkout.VARIABLE, cpu.VARIABLE)}
    done = subprocess.run(
        [sys.executable, "-m", f"slime_backend.slime_hooks.{module}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, checkout.VARIABLE: str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"reef-slime: SLIME_SRC={tmp_path} is not a slime checkout")


def test_ray_gets_the_hook_and_what_workers_must_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cpu.VARIABLE, "cpu")
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    environment = ray_start.runtime_env()
    assert environment["worker_process_setup_hook"] == "slime_backend.slime_hooks.worker_setup.setup"
    assert environment["env_vars"] == {cpu.VARIABLE: "cpu"}
    # Ray refuses a variable that the job has given too (ray job submit --runtime-env-json).
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"env_vars": {cpu.VARIABLE: "cpu"}}}))
    assert "env_vars" not in ray_start.runtime_env()


def test_logical_gpus_for_every_trainer_and_engine():
    args = SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=2, rollout_num_gpus=3)
    options = ray_start.local_cpu_options(args)
    assert options["num_gpus"] == 5
    assert options["_node_ip_address"] == "127.0.0.1"
    assert not options["include_dashboard"]


def test_numpy_2_passes_slimes_assertion_only_where_it_stands():
    import numpy

    def init():
        assert np.__version__.startswith("1."), "Megatron does not support numpy 2.x"  # type: ignore[name-defined]  # noqa: F821

    module = SimpleNamespace(np=numpy, init=init)
    compat.pass_numpy_assertion(module)
    assert module.np.__version__.startswith("1.")
    assert module.np.zeros is numpy.zeros
    later = SimpleNamespace(np=numpy, init=lambda: None)
    compat.pass_numpy_assertion(later)
    assert later.np is numpy
