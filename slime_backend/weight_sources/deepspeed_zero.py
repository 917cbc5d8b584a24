"""Weights of a DeepSpeed engine, ZeRO stage 0 to 3, under the names of the Hugging Face model inside it.

Up to stage 2 every rank has the whole parameters (the fp32 master copy alone is partitioned), so rank 0 hands them over
as they are. In stage 3 each rank has a flat piece of each parameter, `parameter.ds_tensor`, padded to equal length
(DeepSpeed 0.19, runtime/zero/partition_parameters.py). These pieces are what the optimizer updates, and they are
collected on rank 0. `deepspeed.zero.GatheredParameters` would build every parameter on every rank instead.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_backend.weight_sources.buckets import BUCKET_BYTES
from slime_backend.weight_sources.gathered import GatheredSource, Part, SourceError


class DeepSpeedZeroSource(GatheredSource):
    """A WeightSource over what `deepspeed.initialize` returned for a `transformers` model, or for a module around
    `model`. See GatheredSource for its use with several processes, and for `template`.

    Tensors have the dtype of the module (bf16 where DeepSpeed trains in bf16). Publish between two steps only.
    Raises SourceError for parameters on NVMe and for pieces that aren't spread over all ranks.
    """

    def __init__(self, engine: Any, template: Path, *, model: Any = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        # named_parameters() lists a tied tensor once, under its first name.
        named = list((model or engine.module).named_parameters())
        if engine.zero_optimization_stage() < 3:
            parts = [Part(name, tuple(p.shape), p.dtype, partial(_whole, p)) for name, p in named]
            super().__init__(parts, template, ranks=[0], bucket_bytes=bucket_bytes)
            return
        for name, parameter in named:
            _check_pieces(name, parameter)
        parts = [Part(name, tuple(p.ds_shape), p.dtype, partial(self._gather, p)) for name, p in named]
        super().__init__(parts, template, ranks=range(dist.get_world_size()), bucket_bytes=bucket_bytes)

    def _gather(self, parameter: Any) -> torch.Tensor | None:
        flat = self._collect(parameter.ds_tensor.detach(), parameter.ds_process_group)
        return None if flat is None else flat[: parameter.ds_numel].view(parameter.ds_shape)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().contiguous()


def _check_pieces(name: str, parameter: Any) -> None:
    if parameter.ds_tensor.status.name != "AVAILABLE":
        raise SourceError(f"{name} lies on NVMe; publish with offload_param on the CPU or without it")
    spread = dist.get_world_size(parameter.ds_process_group)
    if spread != dist.get_world_size():
        raise SourceError(
            f"{name} is partitioned over {spread} of {dist.get_world_size()} ranks (MiCS, or experts); publish without"
        )
