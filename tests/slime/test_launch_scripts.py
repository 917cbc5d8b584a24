"""Every launch script's flags, parsed by slime's real parser with Megatron-core's and SGLang's behind it, on the config
of the model that the script trains. One process for all: its imports take most of the time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch_scripts import LOOPS, ROOT, our_flags, printed, slime_flags

pytestmark = [pytest.mark.slime, pytest.mark.slow]
ROLLOUTS = "slime_backend.slime_hooks.rollouts"


def dense(**more):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        **{"rope_theta": 1e6, **more},
    )


def mixture():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        rope_theta=1e6,
        architectures=["Qwen3MoeForCausalLM"],
    )


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """What parse_flags.py prints for all scripts, and for one that must be refused."""
    if not os.environ.get("SLIME_SRC"):
        pytest.skip("SLIME_SRC names no slime checkout")
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    models, runs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("runs")
    window = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(36)]
    hybrid = dense(use_sliding_window=True, sliding_window=4096, max_window_layers=0, layer_types=window)
    configs = {"Qwen3-4B": dense(), "qwen3-4b-sft": dense(rope_theta=5e6), "Qwen3-30B-A3B": mixture()}
    for name, config in {**configs, "Qwen3-4B-hybrid": hybrid}.items():
        config.save_pretrained(models / name)
        (models / f"{name}_torch_dist").mkdir()
    variables = {"MODELS": str(models), "RUNS": str(runs), "SLIME_SRC": os.environ["SLIME_SRC"]}
    jobs = {name: [loop, *printed(name, **variables)] for name, loop in LOOPS.items()}
    jobs["another model"] = [*jobs["slime_qwen3_4b_disjoint"], "--hidden-size", "2048"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse_flags.py"))],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=300,
        # The CPU mode, so that Megatron-core can be imported without a driver.
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLIME_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LOOPS)
def test_slime_s_parser_takes_every_flag(parsed, name):
    assert "error" not in parsed["jobs"][name], parsed["jobs"][name]
    assert parsed["jobs"][name]["rollout_function_path"] == f"{ROLLOUTS}.generate_rollout"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("slime_qwen3_4b_disjoint", ("retract", False)),
        ("slime_qwen3_30b_a3b_colocated", ("retract", False)),
        ("slime_hybrid_swa_disjoint", ("in_place", False)),
        ("slime_agentic_fully_async", ("in_place", False)),
    ],
)
def test_the_policy_of_each_script(parsed, name, expected):
    job = parsed["jobs"][name]
    assert (job["pause_generation_mode"], job["sglang_disable_radix_cache"]) == expected


def test_what_the_scripts_promise(parsed):
    jobs = parsed["jobs"]
    assert jobs["slime_qwen3_30b_a3b_colocated"]["colocate"] is True
    assert jobs["slime_qwen3_30b_a3b_colocated"]["num_experts"] == 128
    assert jobs["slime_hybrid_swa_disjoint"]["window_size"] == [4095, 0]
    agentic = jobs["slime_agentic_fully_async"]
    assert (agentic["max_version_lag"], agentic["use_tis"]) == (4, True)
    assert agentic["custom_tis_function_path"] == "slime_backend.slime_hooks.importance.correct"


def test_another_model_than_the_script_s_is_refused(parsed):
    assert "hidden_size" in parsed["jobs"]["another model"]["error"]


def test_the_list_of_flags_is_the_parsers_own(parsed):
    """slime ignores a flag that it doesn't know (Megatron-core parses with parse_known_args), so a misspelled one
    passes its parser: tests/test_launch_scripts.py holds every flag against this list."""
    theirs = set(parsed["flags"]) - our_flags()
    assert sorted(slime_flags() - theirs) == []  # slime no longer has these
    assert sorted(theirs - slime_flags()) == []  # slime has these now
