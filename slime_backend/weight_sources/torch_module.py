"""Weights of a Hugging Face model that lives in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel


class TorchModuleSource:
    """A WeightSource over a `transformers` model.

    `template` is the directory whose config.json and tokenizer files each saved checkpoint repeats, since keys such
    as `is_hybrid_swa` are the engine's and would be lost by `save_pretrained`.
    """

    def __init__(self, model: PreTrainedModel, template: Path) -> None:
        self.model = model
        self.template = template

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # named_parameters() lists a tied tensor once, under its first name.
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().contiguous()

    def save(self, directory: Path) -> None:
        """Write into a sibling directory and rename, so that a checkpoint is complete or absent."""
        if (directory / "config.json").is_file():
            return
        from safetensors.torch import save_file

        partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            save_file(dict(self.named_tensors()), str(partial / "model.safetensors"), metadata={"format": "pt"})
            for file in self.template.iterdir():
                if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in file.name:
                    shutil.copyfile(file, partial / file.name)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
