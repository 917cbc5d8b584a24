"""A Hugging Face checkpoint on disk: written bucket by bucket, complete or absent; and what one says of its tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from slime_backend.run_files import new_directory

INDEX = "model.safetensors.index.json"


def write_checkpoint(directory: Path, template: Path, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Write each bucket as one safetensors file, and the config and tokenizer files of `template` next to them.

    The files of the template are copied since keys such as `is_hybrid_swa` are the engine's and would be lost by
    `save_pretrained`. Written into a sibling directory and renamed; a directory that is complete already is left alone,
    and `buckets` not read.
    """
    if (directory / "config.json").is_file():
        return
    from safetensors.torch import save_file

    with new_directory(directory) as partial:
        written: list[tuple[Path, dict[str, int]]] = []  # file -> tensor -> bytes
        for bucket in buckets:
            file = partial / f"bucket-{len(written)}"
            save_file(dict(bucket), str(file), metadata={"format": "pt"})
            written.append((file, {name: tensor.nbytes for name, tensor in bucket}))
            del bucket  # before the next one is gathered
        _name_files(partial, written)
        for file in template.iterdir():
            if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in file.name:
                shutil.copyfile(file, partial / file.name)


def _name_files(directory: Path, written: Sequence[tuple[Path, dict[str, int]]]) -> None:
    """The names that Hugging Face's loaders look for, and the index where there are several files."""
    if len(written) == 1:
        written[0][0].rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, (file, tensors) in enumerate(written, 1):
        named = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        file.rename(directory / named)
        places |= dict.fromkeys(tensors, named)
    size = sum(sum(tensors.values()) for _, tensors in written)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of `directory`; reads their headers only."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes
