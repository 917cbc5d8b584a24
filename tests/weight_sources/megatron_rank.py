"""One rank of a Megatron-core model filled from a Hugging Face checkpoint, and what the source makes of it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from slime_backend.weight_sources.megatron import MegatronSource, _heads

PAD = 16  # rows that Megatron-core's vocabulary has more


def convert(rank: int, folder: Path, *, checkpoint: str, fused_norms: bool, wrong_split: bool) -> dict[str, Any]:
    """{"unequal": names, "missing": names, "logits": largest difference of Megatron-core's own forward from the model
    of the saved checkpoint} on rank 0."""
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    from slime_backend import cpu

    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp = torch.distributed.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        model_parallel_cuda_manual_seed(1)
    template = Path(checkpoint)
    hf = AutoModelForCausalLM.from_pretrained(template, dtype=torch.float32).eval()
    model = build(hf.config, tp, fused_norms).eval()
    fill(model, hf, rank, tp)
    kind = WrongSplit if wrong_split else MegatronSource
    source = kind(model, template, bucket_bytes=1 << 16)
    if rank:
        source.follow()
        logits(model)
        return {}
    with source.leading():
        found = dict(source.named_tensors())
        source.save(folder / "saved")
    expected = dict(hf.named_parameters())
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32).eval()
    with torch.no_grad():
        again = saved(tokens()).logits[0]
    return {
        "unequal": [n for n, t in found.items() if not torch.equal(t, expected[n])],
        "missing": sorted(set(expected) - set(found)),
        "files": len(list((folder / "saved").glob("*.safetensors"))),
        "logits": float((logits(model)[:, : again.shape[1]] - again).abs().max()),
    }


class WrongSplit(MegatronSource):
    """Takes each rank's share for all query heads, then all key heads, then all value heads."""

    def _qkv(self) -> list[Any]:
        ranks = torch.distributed.get_world_size(self._group)
        heads, groups = self.config.num_attention_heads // ranks, self.config.num_query_groups // ranks
        bounds = ((0, heads), (heads, heads + groups), (heads + groups, heads + 2 * groups))
        width = self.config.kv_channels
        return [partial(_heads, heads=heads + 2 * groups, width=width, first=a, last=b) for a, b in bounds]


def build(config: AutoConfig, tp: int, fused_norms: bool) -> Any:
    """A GPTModel of the shape of a Hugging Face config."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    qwen2, qwen3 = config.model_type == "qwen2", config.model_type == "qwen3"
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=qwen2,
        qk_layernorm=qwen3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=qwen3, normalization="RMSNorm")
    if fused_norms:
        from slime_backend.cpu.layer_spec import get_spec

        spec = get_spec(SimpleNamespace(qk_layernorm=qwen3, normalization="RMSNorm"), settings)
    return GPTModel(
        settings,
        spec,
        vocab_size=config.vocab_size + PAD,
        max_sequence_length=128,
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )


@torch.no_grad()
def fill(model: Any, hf: Any, rank: int, tp: int) -> None:
    """Copy the weights in, head by head: written apart from the source's own conversion, and checked by the logits."""
    config, weights = hf.config, dict(hf.named_parameters())
    width = model.config.kv_channels
    per_group = config.num_attention_heads // config.num_key_value_heads
    mine = range(rank * config.num_key_value_heads // tp, (rank + 1) * config.num_key_value_heads // tp)

    def share(weight: torch.Tensor, dim: int) -> torch.Tensor:
        return weight.chunk(tp, dim)[rank]

    def fused(layer: str, kind: str) -> torch.Tensor:
        def head(letter: str, number: int) -> torch.Tensor:
            return weights[f"{layer}self_attn.{letter}_proj.{kind}"][number * width : (number + 1) * width]

        rows = []
        for group in mine:
            rows += [head("q", group * per_group + i) for i in range(per_group)]
            rows += [head("k", group), head("v", group)]
        return torch.cat(rows)

    def padded(weight: torch.Tensor) -> torch.Tensor:
        return share(torch.cat([weight, torch.full((PAD, weight.shape[1]), 7.0)]), 0)

    for name, parameter in model.named_parameters():
        layer = f"model.layers.{name.split('.')[2]}." if name.startswith("decoder.layers.") else ""
        if name == "embedding.word_embeddings.weight":
            value = padded(weights["model.embed_tokens.weight"])
        elif name == "output_layer.weight":
            value = padded(weights["lm_head.weight"])
        elif name == "decoder.final_layernorm.weight":
            value = weights["model.norm.weight"]
        elif name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
            value = fused(layer, name.rpartition(".")[2])
        elif name.endswith("linear_proj.weight"):
            value = share(weights[f"{layer}self_attn.o_proj.weight"], 1)
        elif name.endswith("linear_fc1.weight"):
            value = torch.cat([share(weights[f"{layer}mlp.{which}_proj.weight"], 0) for which in ("gate", "up")])
        elif name.endswith("linear_fc2.weight"):
            value = share(weights[f"{layer}mlp.down_proj.weight"], 1)
        elif name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            value = weights[f"{layer}self_attn.{name.split('.')[-2][0]}_norm.weight"]
        elif name.endswith(("input_layernorm.weight", "linear_qkv.layer_norm_weight")):
            value = weights[f"{layer}input_layernorm.weight"]
        else:
            assert name.endswith(("pre_mlp_layernorm.weight", "linear_fc1.layer_norm_weight")), name
            value = weights[f"{layer}post_attention_layernorm.weight"]
        parameter.copy_(value)


def tokens() -> torch.Tensor:
    return torch.arange(3, 60, 2).unsqueeze(0)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """(tokens, vocabulary + PAD) of Megatron-core's own forward."""
    ids = tokens()
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(ids, torch.arange(length).unsqueeze(0), mask)[0]
