"""This makes a tiny dense model for slime on a CPU: checkpoint, tokenizer, prompts, and the flags that describe it.

    python -m slime_backend.cpu.tiny DIR      # makes DIR/model and DIR/prompts.jsonl, prints the flags, one a line

slime wants the shape of a model twice: in the Hugging Face config, and as flags for Megatron-core.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = 64


def make(directory: Path) -> list[str]:
    """Make what is missing in `directory`; return the flags for slime that name it and describe the model.

    Raises ModelError where the directory holds something else.
    """
    from slime_backend.simulation.models import make_tiny_model

    directory = directory.resolve()  # Ray's workers may run elsewhere
    model = make_tiny_model(directory / "model")
    prompts = directory / "prompts.jsonl"
    if not prompts.exists():
        rows = [{"prompt": f"What is {i} plus {i + 1}? Answer: ", "label": str(2 * i + 1)} for i in range(PROMPTS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((model / "config.json").read_text())
    return [
        *("--hf-checkpoint", str(model)),
        *("--load", str(model)),
        *("--ref-load", str(model)),  # read where the job has a KL term
        *("--prompt-data", str(prompts)),
        *("--input-key", "prompt"),
        *("--label-key", "label"),
        *megatron_flags(config),
    ]


def megatron_flags(config: Mapping[str, Any]) -> list[str]:
    """Return Megatron-core's flags for a dense Qwen3 model; `config`: its Hugging Face config.json."""
    rope = config.get("rope_parameters") or {}
    flags = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--num-query-groups": config["num_key_value_heads"],
        "--kv-channels": config["head_dim"],
        "--vocab-size": config["vocab_size"],
        "--make-vocab-size-divisible-by": 1,
        "--normalization": "RMSNorm",
        "--norm-epsilon": config["rms_norm_eps"],
        "--rotary-base": int(rope.get("rope_theta") or config["rope_theta"]),
        "--position-embedding-type": "rope",
    }
    switches = ["--group-query-attention", "--qk-layernorm", "--swiglu", "--disable-bias-linear"]
    switches.append("--use-rotary-position-embeddings")
    if not config["tie_word_embeddings"]:
        switches.append("--untie-embeddings-and-output-weights")
    return [word for name, value in flags.items() for word in (name, str(value))] + switches


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Return the share of digits in the response, 0..1; it is slime's `--custom-rm-path` for these prompts."""
    text = sample.response or ""
    return sum(character.isdigit() for character in text) / max(1, len(text))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slime_backend.cpu.tiny DIR")
    print("\n".join(make(Path(sys.argv[1]))))
