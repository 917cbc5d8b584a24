"""Launch scripts and --sglang-config files for GPU jobs, without slime: flags against the list of those that slime's
parsers know (tests/contracts), the job that is submitted with a stand-in for Ray. slime's real parser: tests/slime."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch_scripts import LOOPS, ROOT, our_flags, printed, run, script, slime_flags, value

CONTRACTS = ROOT / "tests" / "contracts"
CONFIGS = sorted((ROOT / "configs" / "slime").glob("*.yaml"))
WORKERS = ("regular", "prefill", "decode", "placeholder", "encoder")
names = pytest.mark.parametrize("name", LOOPS)


def unknown(words):
    known = slime_flags() | our_flags()
    return [w for w in words if w.startswith("--") and w.partition("=")[0] not in known]


@names
def test_every_flag_is_one_that_slime_s_parsers_know(name):
    words = printed(name)
    assert len([w for w in words if w.startswith("--")]) > 30
    assert unknown(words) == []


def test_a_flag_that_nobody_knows_is_found():
    assert unknown(["--rollout-batch-size", "8", "--roll-out-batch-size", "8", "--disjoint-prefix-sharing=off"]) == [
        "--roll-out-batch-size"
    ]


@names
def test_flags_of_the_command_line_come_last_and_win(name):
    done = run(name, "--num-rollout", "1", PRINT_ARGS="1")
    assert done.stdout.splitlines()[-2:] == ["--num-rollout", "1"]


@names
def test_without_slime_a_script_says_so_and_starts_nothing(name, tmp_path):
    done = run(name, SLIME_SRC=str(tmp_path), PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert f"{tmp_path}/scripts/models/" in done.stderr
    assert done.stderr.endswith("is not there; set SLIME_SRC to a slime checkout\n")


@pytest.fixture
def fake_ray(tmp_path):
    """A `ray` that writes down how it was called and knows no running cluster, a Python, and a checkout with models'
    flags."""
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    (tools / "ray").write_text(
        f'#!/bin/bash\nprintf "%s\\0" "$@" >> {calls}; printf "\\x1e" >> {calls}; [[ $1 != status ]]\n'
    )
    (tools / "python3").write_text("#!/bin/bash\nexit 0\n")  # in which reef-slime is installed
    (tools / "nvidia-smi").write_text('#!/bin/bash\necho "GPU0 X NV12"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    models = tmp_path / "slime" / "scripts" / "models"
    models.mkdir(parents=True)
    for model in ("qwen3-4B", "qwen3-30B-A3B"):
        (models / f"{model}.sh").write_text('MODEL_ARGS=(--num-layers 36 --moe-layer-freq "[1, 1]")\n')
    return tmp_path, lambda: [line.split("\0")[:-1] for line in calls.read_text().split("\x1e")[:-1]]


@names
def test_a_script_submits_slime_s_loop_with_ours_around_it(name, fake_ray):
    root, calls = fake_ray
    done = run(name, SLIME_SRC=str(root / "slime"), PATH=f"{root / 'bin'}:/usr/bin:/bin", WANDB_PROJECT="p")
    assert done.returncode == 0, done.stderr
    status, start, submit = calls()
    assert (status[0], start[0], submit[:2]) == ("status", "start", ["job", "submit"])
    entry = submit[submit.index("--") + 1 :]
    assert entry[:3] == ["python3", "-m", f"slime_backend.slime_hooks.{LOOPS[name]}"]
    assert value(entry, "--moe-layer-freq") == "[1, 1]"
    assert (value(entry, "--wandb-project"), value(entry, "--wandb-group")) == ("p", name)
    variables = json.loads(value(submit, "--runtime-env-json"))["env_vars"]
    assert variables["NCCL_NVLS_ENABLE"] == "1"
    assert str(ROOT) in variables["PYTHONPATH"].split(":")


@names
def test_the_gpus_of_an_sglang_config_are_those_of_the_script(name):
    words = printed(name)
    gpus = value(words, "--actor-num-gpus-per-node") if "--colocate" in words else value(words, "--rollout-num-gpus")
    if "--sglang-config" in words:
        groups = [g for m in load(Path(value(words, "--sglang-config"))) for g in m["server_groups"]]
        assert sum(g["num_gpus"] for g in groups) == int(gpus)


def load(path):
    return yaml.safe_load(path.read_text())["sglang"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_an_sglang_config_has_only_fields_that_slime_reads(path):
    symbols = json.loads((CONTRACTS / "slime-0.3.1.json").read_text())["modules"][
        "slime.backends.sglang_utils.sglang_config"
    ]["symbols"]
    for model in load(path):
        assert set(model) <= set(symbols["ModelConfig"]["fields"])
        for group in model["server_groups"]:
            assert set(group) <= set(symbols["ServerGroupConfig"]["fields"])
            assert group["worker_type"] in WORKERS
            per_engine = group.get("num_gpus_per_engine") or model["num_gpus_per_engine"]
            assert group["num_gpus"] % per_engine == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_an_sglang_config_overrides_only_what_sglang_has(path):
    arguments = pytest.importorskip("sglang.srt.server_args", reason="sglang is not installed")
    kind = arguments.ServerArgs
    fields = (
        {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(kind.__struct_fields__)
    )
    assert "disable_radix_cache" in fields
    overrides = {key for model in load(path) for group in model["server_groups"] for key in group.get("overrides", {})}
    assert overrides <= fields


def test_one_model_of_a_config_is_trained_and_others_say_that_they_are_not():
    for path in CONFIGS:
        assert [m["update_weights"] for m in load(path)].count(True) == 1, path.name


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path):
    tool = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("shellcheck is not installed; make env installs it")
    done = subprocess.run(
        [tool, "--external-sources", "--source-path=SCRIPTDIR", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_launch_script_is_tested():
    assert {p.stem for p in (ROOT / "scripts").glob("slime_*.sh")} == {*LOOPS, "slime_common", "slime_cpu"}
    assert all(script(name).stat().st_mode & 0o100 for name in LOOPS)
