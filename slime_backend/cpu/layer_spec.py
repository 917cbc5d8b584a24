"""This is a Megatron-core layer for CPU training: `--spec slime_backend.cpu.layer_spec get_spec` (slime's own flag).

Megatron-core's local layers differ from Transformer Engine's in two ways that matter to slime:
  - their attention refuses packed sequences, and slime packs every batch (slime 0.3.1, megatron_utils/data.py:98);
  - their norms are modules of their own, while slime's conversion from and to Hugging Face names knows the norms that
    are fused into the linear layer after them (`linear_qkv.layer_norm_weight`).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule

Tensor = torch.Tensor


class NormColumnParallelLinear(ColumnParallelLinear):
    """This is RMSNorm, then the column-parallel linear layer; named as Transformer Engine's fused one."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.tensor_model_parallel = False  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = F.rms_norm(hidden, (hidden.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class PackedAttention(MegatronModule):
    """This computes causal attention, one call per packed sequence.

    q [T, H, D] and k, v [T, KV, D] with `packed_seq_params` (T tokens of all sequences) -> [T, H * D];
    q [S, B, H, D] and k, v [S, B, KV, D] without -> [S, B, H * D].
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("the CPU attention has no dropout; pass --attention-dropout 0")
        if config.context_parallel_size > 1:
            raise ValueError("the CPU attention needs complete sequences; pass --context-parallel-size 1")
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))  # [B, H, S, D]
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        sequences = []
        for start, end in itertools.pairwise(bounds):
            out = self._attend(*(t[start:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value)))
            sequences.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(sequences).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)


def get_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the local layer of Megatron-core with the two changes; arguments as slime passes them to a `--spec`."""
    layer = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    parts = layer.submodules
    parts.input_layernorm = IdentityOp
    parts.pre_mlp_layernorm = IdentityOp
    parts.sharded_state_dict_keys_map = {}  # it would rename the removed norms
    attention, mlp = _submodules(parts.self_attention), _submodules(parts.mlp)
    attention.core_attention = PackedAttention
    attention.linear_qkv = NormColumnParallelLinear
    mlp.linear_fc1 = NormColumnParallelLinear
    return layer


def _submodules(spec: Any) -> Any:
    """Return the submodules; Megatron-core 0.19 has ModuleSpec for some parts and functools.partial for others."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
