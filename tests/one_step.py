"""Two versions of a tiny model that are one training step apart, and checkpoints that mix them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime_backend.local_trainer.grpo import GrpoConfig, Sample, grpo_step, make_optimizer
from slime_backend.simulation.models import load_model, make_tiny_model
from slime_backend.weight_sources.torch_module import TorchModuleSource

LETTERS = 256  # the tokens of the byte-level vocabulary that stand for bytes
PROMPT = 48


def one_step_apart(folder: Path, learning_rate: float) -> dict[str, Path]:
    """v0, v1 and, by number of the tensor that stayed v0's, mixed checkpoints: v1 is v0 after one real GRPO step.

    Adam's first step moves each weight by about the learning rate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    v0 = make_tiny_model(folder / "v0", seed=3, hidden_size=64, max_positions=32768)
    model = load_model(v0)
    rng = random.Random(3)
    groups = []
    for group in range(4):
        prompt = [rng.randrange(LETTERS) for _ in range(PROMPT)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(group)
            answers = model.generate(
                torch.tensor([prompt] * 8), do_sample=True, max_new_tokens=16, eos_token_id=None, pad_token_id=0
            )[:, len(prompt) :].tolist()
        groups.append([Sample(prompt, a, [-5.5] * len(a), sum(t < 128 for t in a) / len(a), group) for a in answers])
    config = GrpoConfig(learning_rate=learning_rate, ratio_bound=1e9)
    grpo_step(model, make_optimizer(model, config), groups, config)
    TorchModuleSource(model, v0).save(folder / "v1")
    return {"v0": v0, "v1": folder / "v1"}


def mixed(paths: dict[str, Path], old: Sequence[str], target: Path) -> Path:
    """The checkpoint v1 with the tensors `old` of v0."""
    shutil.copytree(paths["v1"], target)
    tensors, before = load_file(paths["v1"] / "model.safetensors"), load_file(paths["v0"] / "model.safetensors")
    for name in old:
        tensors[name] = before[name]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def tensor_names(paths: dict[str, Path]) -> list[str]:
    """In the order of the model."""
    return [name for name, _ in load_model(paths["v1"]).named_parameters()]
