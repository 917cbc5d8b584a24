"""Weights of a Hugging Face model that lives in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from slime_backend.weight_sources.checkpoint import write_checkpoint


class TorchModuleSource:
    """A WeightSource over a `transformers` model.

    `template` is the directory whose config.json and tokenizer files each saved checkpoint repeats.
    """

    def __init__(self, model: PreTrainedModel, template: Path) -> None:
        self.model = model
        self.template = template

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # named_parameters() lists a tied tensor once, under its first name.
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().contiguous()

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(p.shape), p.dtype) for name, p in self.model.named_parameters()}

    def save(self, directory: Path) -> None:
        write_checkpoint(directory, self.template, [list(self.named_tensors())])  # views: nothing is gathered
