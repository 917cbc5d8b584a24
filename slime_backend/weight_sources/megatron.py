"""Weights of a Megatron-core GPTModel under Hugging Face names: dense models like Qwen2, Qwen3 and Llama.

For a training loop of one's own; slime brings its own conversion. Written for Megatron-core 0.19.2.

    linear_qkv   rows by query group: its query heads, its key head, its value head (transformer/attention.py,
                 get_query_key_value_tensors); a tensor-parallel rank has whole groups
    linear_fc1   gate rows, then up rows, both of the rank's own share (transformer/mlp.py, glu)
    norms        modules of their own, or fused into the linear layer behind them (Transformer Engine)
    embeddings   rows padded to a multiple; the config of the template says how many count
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_backend.weight_sources.buckets import BUCKET_BYTES
from slime_backend.weight_sources.gathered import GatheredSource, Part, SourceError

Tensor = torch.Tensor
Take = Callable[[Tensor], Tensor]

# Megatron-core's name -> Hugging Face's, and the dimension along which tensor-parallel ranks share it.
_OUTSIDE: dict[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
_LAYER: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PADDED = {"model.embed_tokens.weight", "lm_head.weight"}


class MegatronSource(GatheredSource):
    """A WeightSource over a GPTModel, bare or inside Megatron-core's wrappers (DistributedDataParallel, Float16Module).

    Made on every rank, see GatheredSource. The tensor-parallel group of global rank 0 publishes; the ranks of other
    groups have copies of the same weights, and their `follow` returns at once. `template`: a Hugging Face checkpoint
    directory, with `vocab_size` in its config.

    Raises SourceError for what isn't converted: pipeline parallelism, experts, fewer query groups than ranks, norms
    centred at zero, gated attention.
    """

    def __init__(self, model: Any, template: Path, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.config = model.config
        bare = _unwrapped(model)
        self._vocabulary = int(json.loads((template / "config.json").read_text())["vocab_size"])
        self._group = bare.pg_collection.tp
        ranks = _publishing_ranks(self._group)
        _check(self.config, bare, len(dist.get_process_group_ranks(self._group)))
        parts = [part for name, p in bare.named_parameters() for part in self._parts(name, p)]
        super().__init__(parts, template, ranks=ranks, bucket_bytes=bucket_bytes)

    def _parts(self, name: str, parameter: Tensor) -> Iterator[Part]:
        """The tensors that one parameter becomes. Raises SourceError for an unknown name."""
        found = _LAYER_NAME.fullmatch(name)
        if found is None:
            if name not in _OUTSIDE:
                raise SourceError(f"Megatron-core's parameter {name} has no place in a dense Hugging Face model")
            yield self._part(*_OUTSIDE[name], parameter, _all)
            return
        prefix, inner = f"model.layers.{found[1]}.", found[2]
        module, _, kind = inner.rpartition(".")
        if module == "self_attention.linear_qkv" and kind in ("weight", "bias"):
            for letter, take in zip("qkv", self._qkv(), strict=True):
                yield self._part(f"{prefix}self_attn.{letter}_proj.{kind}", 0, parameter, take)
        elif inner == "mlp.linear_fc1.weight":
            for number, which in enumerate(("gate", "up")):
                yield self._part(f"{prefix}mlp.{which}_proj.weight", 0, parameter, partial(_half, number=number))
        elif inner in _LAYER:
            hf_name, dim = _LAYER[inner]
            yield self._part(prefix + hf_name, dim, parameter, _all)
        else:
            raise SourceError(f"Megatron-core's parameter {name} has no place in a dense Hugging Face model")

    def _qkv(self) -> list[Take]:
        """Of a rank's linear_qkv: its query, key and value rows."""
        queries = self.config.num_attention_heads // self.config.num_query_groups
        width = self.config.kv_channels
        bounds = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))
        return [partial(_heads, heads=queries + 2, width=width, first=a, last=b) for a, b in bounds]

    def _part(self, hf_name: str, dim: int | None, parameter: Tensor, take: Take) -> Part:
        """`dim`: along which ranks share it; None where each has the whole."""
        shape = list(take(parameter.detach()).shape)
        if dim is not None:
            shape[dim] *= dist.get_world_size(self._group)
        if hf_name in _PADDED:
            shape[0] = self._vocabulary
        gather = partial(self._gather, parameter, take, dim, shape[0])
        return Part(hf_name, tuple(shape), parameter.dtype, gather)

    def _gather(self, parameter: Tensor, take: Take, dim: int | None, rows: int) -> Tensor | None:
        piece = take(parameter.detach()).contiguous()
        whole = piece if dim is None else self._collect(piece, self._group, dim=dim)
        return None if whole is None else whole[:rows]


def _all(weight: Tensor) -> Tensor:
    return weight


def _half(weight: Tensor, number: int) -> Tensor:
    return weight.chunk(2)[number]


def _heads(weight: Tensor, *, heads: int, width: int, first: int, last: int) -> Tensor:
    """(groups * heads * width, ...) -> (groups * (last - first) * width, ...): some heads of each group."""
    return weight.unflatten(0, (-1, heads, width))[:, first:last].flatten(0, 2)


def _unwrapped(model: Any) -> Any:
    while not hasattr(model, "decoder"):
        if not hasattr(model, "module"):
            raise SourceError(f"{type(model).__name__} is no GPTModel, nor one in Megatron-core's wrappers")
        settings = getattr(model, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            # Megatron-core then gathers the updated parameters during the next forward only.
            raise SourceError("overlap_param_gather leaves old weights after a step; publish with it turned off")
        model = model.module
    return model


def _publishing_ranks(group: dist.ProcessGroup) -> list[int]:
    """The tensor-parallel group of global rank 0."""
    groups: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(groups, dist.get_process_group_ranks(group))
    return list(groups[0])


def _check(config: Any, model: Any, ranks: int) -> None:
    refused = {
        "pipeline parallelism": not (model.pre_process and model.post_process),
        "experts": bool(getattr(config, "num_moe_experts", None)),
        f"fewer query groups ({config.num_query_groups}) than tensor-parallel ranks ({ranks})": (
            config.num_query_groups < ranks
        ),
        "norms centred at zero": getattr(config, "layernorm_zero_centered_gamma", False),
        "gated attention": getattr(config, "attention_output_gate", False),
        "an MLP without a gate": not config.gated_linear_unit,
    }
    for what, there in refused.items():
        if there:
            raise SourceError(f"{what}: this source doesn't convert it")
