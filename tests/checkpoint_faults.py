"""Checkpoints with one fault each, made of a good one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Fault = Callable[[Path], None]


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def one_missing(d: Path) -> None:
    rewritten(d, lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))


def half_missing(d: Path) -> None:
    rewritten(d, lambda t: [t.pop(name) for name in sorted(t)[::2]])


def one_too_many(d: Path) -> None:
    rewritten(d, lambda t: t.update({"model.layers.0.mlp.extra.weight": torch.zeros(4)}))


def other_names(d: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors["_orig_mod." + name] = tensors.pop(name)

    rewritten(d, rename)


def other_shape(d: Path) -> None:
    rewritten(d, lambda t: t.update({"model.norm.weight": torch.zeros(3)}))


def other_kind(d: Path) -> None:
    rewritten(d, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))


def cut_off(d: Path) -> None:
    file = d / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])


def cut_off_in_the_header(d: Path) -> None:
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def empty_file(d: Path) -> None:
    (d / "model.safetensors").write_bytes(b"")


def trailing_bytes(d: Path) -> None:
    with (d / "model.safetensors").open("ab") as file:
        file.write(bytes(16))


def no_safetensors(d: Path) -> None:
    (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)


def only_bin(d: Path) -> None:
    (d / "model.safetensors").rename(d / "pytorch_model.bin")


def dangling_link(d: Path) -> None:
    (d / "model.safetensors").unlink()
    (d / "model.safetensors").symlink_to(d / "blobs" / "gone")


def left_over_shard(d: Path) -> None:
    shutil.copyfile(d / "model.safetensors", d / "model-00002-of-00003.safetensors")


def indexed_file_gone(d: Path) -> None:
    names = dict.fromkeys(load_file(d / "model.safetensors"), "model.safetensors")
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def index_of_another_save(d: Path) -> None:
    names = dict.fromkeys(load_file(d / "model.safetensors"), "model.safetensors") | {"old.weight": "model.safetensors"}
    (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def shard_missing(d: Path) -> None:
    (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors")


def adapter_next_to_it(d: Path) -> None:
    save_file({"lora_a": torch.zeros(2)}, d / "adapter_model.safetensors")


def other_config(d: Path) -> None:
    config = json.loads((d / "config.json").read_text())
    (d / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2 * config["num_attention_heads"]}))


def broken_config(d: Path) -> None:
    (d / "config.json").write_text("{")


# name -> (the fault, what the one line must name)
FAULTS: dict[str, tuple[Fault, str]] = {
    "one_missing": (one_missing, "model.layers.1.mlp.down_proj.weight is missing"),
    "half_missing": (half_missing, "is missing"),
    "one_too_many": (one_too_many, "model.layers.0.mlp.extra.weight is no tensor of"),
    "other_names": (other_names, "_orig_mod."),
    "other_shape": (other_shape, r"model.norm.weight has shape \[3\]"),
    "other_kind": (other_kind, "model.norm.weight is I8"),
    "cut_off": (cut_off, "cut off"),
    "cut_off_in_the_header": (cut_off_in_the_header, "cut off"),
    "empty_file": (empty_file, "aren't a safetensors file"),
    "trailing_bytes": (trailing_bytes, "goes on behind its last tensor"),
    "no_safetensors": (no_safetensors, "aren't a safetensors file"),
    "only_bin": (only_bin, "pytorch_model.bin"),
    "dangling_link": (dangling_link, "can't be read"),
    "left_over_shard": (left_over_shard, "isn't of the same save"),
    "indexed_file_gone": (indexed_file_gone, "which isn't there"),
    "index_of_another_save": (index_of_another_save, "old.weight"),
    "shard_missing": (shard_missing, "shard 2 of 2"),
    "adapter_next_to_it": (adapter_next_to_it, "adapter"),
    "other_config": (other_config, "num_attention_heads"),
    "broken_config": (broken_config, "not JSON"),
}
