"""The CPU mode without slime: when it is awake, the flags it adds, the model it describes, what torch.cuda means."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend import cpu
from slime_backend.cpu import environment, flags, tiny


def test_asleep_unless_slimes_variable_says_cpu(monkeypatch: pytest.MonkeyPatch):
    for value, awake in ((None, False), ("", False), ("cuda", False), ("auto", False), ("cpu", True), (" CPU ", True)):
        monkeypatch.delenv(cpu.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(cpu.VARIABLE, value)
        assert cpu.requested() is awake


def test_variables_of_the_user_stay_but_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0,1"})
    environment.apply()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert os.environ["SLIME_HOST_IP"] == "127.0.0.1"


def test_a_ray_that_starts_sees_no_gpu_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with environment.unhidden_gpus():
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_what_a_cpu_needs_comes_last_and_wins():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-attention-backend")
    parser.add_argument("--spec", nargs="+")
    parser.add_argument("--offload-train", action=argparse.BooleanOptionalAction)
    job = ["--sglang-attention-backend", "fa3", "--spec", "my.spec", "get", "--offload-train"]
    args, _ = parser.parse_known_args([*job, *flags.cpu_flags(job)])
    assert args.sglang_attention_backend == "torch_native"
    assert args.offload_train is False
    assert args.spec == ["my.spec", "get"]  # the job's own layer stays


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_a_job_that_chose_a_precision_chooses_the_engines_too(precision: str):
    assert "--sglang-dtype" in flags.cpu_flags([])
    assert "--sglang-dtype" not in flags.cpu_flags([precision])


def test_a_flag_that_cannot_be_overruled_is_refused():
    with pytest.raises(flags.GpuFlagError, match=r"^--offload can't work on a CPU"):
        flags.cpu_flags(["--colocate", "--offload"])


def test_tiny_model_and_its_flags_agree(tmp_path: Path):
    made = tiny.make(tmp_path)
    assert tiny.make(tmp_path) == made  # the second time it is found
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    value = dict(itertools.pairwise(made))
    assert int(value["--num-layers"]) == config["num_hidden_layers"]
    assert int(value["--vocab-size"]) == config["vocab_size"]
    assert int(value["--kv-channels"]) == config["head_dim"]
    assert float(value["--norm-epsilon"]) == config["rms_norm_eps"]
    assert int(value["--rotary-base"]) == config["rope_parameters"]["rope_theta"]
    assert "--untie-embeddings-and-output-weights" in made
    rows = [json.loads(line) for line in Path(value["--prompt-data"]).read_text().splitlines()]
    assert rows[3] == {"prompt": "What is 3 plus 4? Answer: ", "label": "7"}


# In a process of its own: it changes torch for good.
TORCH = """
import torch
from slime_backend.cpu import torch_cuda

assert torch.Tensor.cuda is not None and not torch.cuda.is_available()
torch_cuda.install()
torch_cuda.install()
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.empty(2, pin_memory=True).device.type == "cpu"
assert torch.ones(2, device=torch.device("cuda", 0)).cuda().device.type == "cpu"
with torch.device("meta"):
    assert torch.empty(2).device.type == "meta"
state = torch.cuda.get_rng_state()
first = torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), first)
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
torch.cuda.Event().record()
assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
"""


def test_names_of_torch_cuda_mean_the_cpu():
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_it_torch_refuses():
    code = "import torch; torch.zeros(2, device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
