"""Which GPUs engines and trainer get, and what an engine is started with on either kind of device. No GPU here: the
count is handed in, and command lines and environments are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_backend.config import ConfigError, make_config
from slime_backend.engine_process import ORIGINAL_LOGPROB, RUN_HOOKS, EngineSettings
from slime_backend.errors import RunError
from slime_backend.local_trainer import devices
from slime_backend.local_trainer.devices import names_of, place
from slime_backend.local_trainer.local_fleet import make_engines
from slime_backend.wire import HOOKS_VARIABLE

CPU_ONLY_FLAGS = ("--disable-overlap-schedule", "torch_native", "--sleep-on-idle", "transformers")
CPU_ONLY_VARIABLES = ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")


def config(**keys):
    return make_config({"device": "cuda", **keys}, "test")


def placed(settings, visible=None):
    return place(settings.engines, settings.trainer, visible=visible)


def made(settings, model, logs):
    return make_engines(settings.engines, settings.policy, model, "v0", logs)


def gpus(count):
    return lambda: [str(i) for i in range(count)]


@pytest.mark.parametrize(
    ("keys", "count", "engines", "trainer"),
    [
        ({}, 3, (("0",), ("1",)), "cuda:2"),
        ({"engine_flags": ["--tp-size", "2"]}, 5, (("0", "1"), ("2", "3")), "cuda:4"),
        ({"engine_flags": ["--tp=2"], "engines": 1}, 8, (("0", "1"),), "cuda:2"),
        ({"engine_flags": ["--tp", "1", "--tensor-parallel-size=3"], "engines": 1}, 4, (("0", "1", "2"),), "cuda:3"),
        ({"engine_flags": ["--tp-size=2", "--dp-size=2"], "engines": 1}, 5, (("0", "1", "2", "3"),), "cuda:4"),
        (
            {"engine_flags": ["--tp-size=2", "--dp-size=2", "--enable-dp-attention"], "engines": 1},
            3,
            (("0", "1"),),
            "cuda:2",
        ),
        ({"trainer_device": "cpu"}, 2, (("0",), ("1",)), "cpu"),
        ({"trainer_device": "cuda:5"}, 6, (("0",), ("1",)), "cuda:5"),
        ({"trainer_device": "cuda"}, 6, (("0",), ("1",)), "cuda:2"),
        ({"trainer": "deepspeed"}, 2, (("0",), ("1",)), "cpu"),
        ({"device": "cpu"}, 0, ((), ()), "cpu"),
        ({"device": "cpu", "trainer_device": "cuda"}, 1, ((), ()), "cuda:0"),
    ],
)
def test_every_engine_and_the_trainer_have_gpus_of_their_own(keys, count, engines, trainer):
    found = placed(config(**keys), gpus(count))
    assert (found.engines, found.trainer) == (engines, trainer)


@pytest.mark.parametrize(
    ("keys", "count", "message"),
    [
        ({}, 0, "engines=2 of 1 GPU each and trainer_device=cuda:2 need 3 GPUs, 0 are visible"),
        ({}, 2, "engines=2 of 1 GPU each and trainer_device=cuda:2 need 3 GPUs, 2 are visible"),
        ({"engine_flags": ["--tp-size", "4"]}, 8, "engines=2 of 4 GPUs each and trainer_device=cuda:8 need 9 GPUs, 8"),
        ({"trainer_device": "cpu"}, 1, "engines=2 of 1 GPU each need 2 GPUs, 1 are visible"),
        ({"trainer_device": "cuda:7"}, 4, "trainer_device=cuda:7 need 8 GPUs, 4 are visible"),
        ({"trainer_device": "cuda:1"}, 4, "trainer_device=cuda:1 is engine1's"),
        ({"device": "cpu", "trainer_device": "cuda:0"}, 0, "need 1 GPUs, 0 are visible"),
        ({"engine_flags": ["--base-gpu-id", "2"]}, 8, "engine_flags has --base-gpu-id"),
        ({"engine_flags": ["--gpu-id-step=2"]}, 8, "engine_flags has --gpu-id-step"),
        ({"engine_flags": ["--tp-size", "two"]}, 8, "--tp-size 'two' must be an integer of at least 1"),
    ],
)
def test_too_few_gpus_are_one_line(keys, count, message):
    with pytest.raises(RunError, match=r"^[^\n]*$") as error:
        placed(config(**keys), gpus(count))
    assert message in str(error.value)


def test_without_a_trainer_no_gpu_is_kept_for_it():
    assert place(config().engines, None, visible=gpus(2)).engines == (("0",), ("1",))


def test_gpus_bear_the_names_that_the_process_was_given():
    assert names_of({}, 2) == ["0", "1"]
    assert names_of({"CUDA_VISIBLE_DEVICES": "5, GPU-ab,7"}, 3) == ["5", "GPU-ab", "7"]
    assert names_of({"CUDA_VISIBLE_DEVICES": "5,6"}, 1) == ["5"]  # of which the driver found one
    assert names_of({"CUDA_VISIBLE_DEVICES": ""}, 0) == []


def test_a_cpu_run_counts_no_gpus(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: pytest.fail("GPUs were counted"))
    assert placed(config(device="cpu")).trainer == "cpu"


def test_engines_on_gpus_are_started_apart_and_without_what_is_for_cpus(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "visible_gpus", gpus(4))
    engines = made(config(engine_flags=["--tp-size", "2"]), tmp_path, tmp_path)
    assert [e.settings.variables()["CUDA_VISIBLE_DEVICES"] for e in engines] == ["0,1", "2,3"]
    for engine in engines:
        command, variables = engine.settings.command(1, 2), engine.settings.variables()
        assert not [flag for flag in CPU_ONLY_FLAGS if flag in command]
        assert not [name for name in CPU_ONLY_VARIABLES if name in variables]
        assert "cpu_attention" not in variables[HOOKS_VARIABLE].split(",")
        assert {"kv_evidence", "kv_spans"} <= set(variables[HOOKS_VARIABLE].split(","))
        assert command[command.index("--device") + 1] == "cuda"


def test_engines_on_the_cpu_are_started_as_ever(tmp_path):
    (engine, _) = made(config(device="cpu", engine_threads=3), tmp_path, tmp_path)
    command, variables = engine.settings.command(1, 2), engine.settings.variables()
    assert not [flag for flag in CPU_ONLY_FLAGS if flag not in command]
    assert (variables["TORCHDYNAMO_DISABLE"], variables["OMP_NUM_THREADS"]) == ("1", "3")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables[HOOKS_VARIABLE] == ",".join(RUN_HOOKS)
    overlapping = EngineSettings(model="m", overlap_schedule=True).command(1, 2)
    assert "--disable-overlap-schedule" not in overlapping


def test_log_probs_are_the_samplers_whatever_the_shell_says(monkeypatch, tmp_path):
    """With SGLANG_RETURN_ORIGINAL_LOGPROB SGLang returns them at temperature 1. A test may still ask for it."""
    monkeypatch.setenv(ORIGINAL_LOGPROB, "true")
    given = []
    monkeypatch.setattr(
        "slime_backend.engine_process.guard.start_guarded", lambda command, environment, log: given.append(environment)
    )
    (engine, _) = made(config(device="cpu"), _model(tmp_path), tmp_path)
    engine.start()
    assert given[0][ORIGINAL_LOGPROB] == "false"
    asked = EngineSettings(model="m", environment={ORIGINAL_LOGPROB: "1"})
    assert asked.variables()[ORIGINAL_LOGPROB] == "1"


def _model(directory: Path) -> Path:
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"device": "cuda:1"}, "device=cuda:1: give cuda"),
        ({"trainer": "deepspeed", "trainer_device": "cuda"}, "trainer=deepspeed trains on the CPU"),
        ({"trainer_device": "gpu"}, "trainer_device='gpu'"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": 1e-7}, "temperature=1e-07"),
        ({"engine_flags": ["--preferred-sampling-params", "{}"]}, "--preferred-sampling-params"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(keys, message):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        config(**keys)
    assert message in str(error.value)
