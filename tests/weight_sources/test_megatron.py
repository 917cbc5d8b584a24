"""Megatron-core's weights under Hugging Face names: equal to the checkpoint that they were filled from, and the model
of what was saved answers as Megatron-core itself does. On real Megatron-core, one and two tensor-parallel processes.

Not here: the training itself (tests/slime), Transformer Engine, pipeline parallelism (refused).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.weight_sources.ranks import run_cases, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed; make test-slime installs it"
)
CONVERT = "tests.weight_sources.megatron_rank:convert"
SHAPE = {
    "vocab_size": 104,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
KINDS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=False)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models whose every weight is random, norms and biases too."""
    made = {}
    for kind, (model_class, config) in KINDS.items():
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        made[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(made[kind])
    return made


CASES = {
    1: [("qwen3", True), ("qwen3", False), ("llama", False)],
    2: [("qwen3", True), ("qwen2", True), ("llama", False)],
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_those_of_the_checkpoint(checkpoints, tmp_path, ranks):
    cases = [
        {"checkpoint": str(checkpoints[kind]), "fused_norms": fused, "wrong_split": False}
        for kind, fused in CASES[ranks]
    ]
    for case, (found, *_) in zip(cases, run_cases(CONVERT, ranks, tmp_path, cases), strict=True):
        assert (found["unequal"], found["missing"]) == ([], []), case
        assert found["logits"] < 1e-4, case
        assert found["files"] > 1  # saved in several buckets


def test_control_a_wrong_split_of_qkv_is_found(checkpoints, tmp_path):
    settings = {"checkpoint": str(checkpoints["qwen3"]), "fused_norms": True, "wrong_split": True}
    found = run_ranks(CONVERT, 2, tmp_path, **settings)[0]
    letters = {f"model.layers.{i}.self_attn.{letter}_proj.weight" for i in range(2) for letter in "qkv"}
    assert set(found["unequal"]) == letters
    assert found["logits"] > 1e-2
