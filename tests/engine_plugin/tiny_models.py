"""Tiny random Qwen3 checkpoints in three weight versions, and the reference they are scored with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VERSIONS = ("v0", "v1", "v2")
WINDOW = 128
VOCABULARY = 512


def write_checkpoints(folder: Path, *, hybrid: bool) -> dict[str, str]:
    """Version -> checkpoint directory. `hybrid` has 4 layers, 3 of them with a sliding window of 128 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = 4 if hybrid else 2
    kinds = ["sliding_attention" if hybrid and i % 4 != 3 else "full_attention" for i in range(layers)]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        # Large enough for attention to tell tokens apart; the default 0.02 makes it nearly uniform.
        initializer_range=0.1,
        use_sliding_window=hybrid,
        sliding_window=WINDOW if hybrid else None,
        max_window_layers=0,
        layer_types=kinds,
    )
    paths = {}
    for seed, version in enumerate(VERSIONS):
        torch.manual_seed(seed)
        path = folder / version
        Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(path)
        if hybrid:
            stored = json.loads((path / "config.json").read_text())
            stored["is_hybrid_swa"] = True
            stored["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
            (path / "config.json").write_text(json.dumps(stored))
        paths[version] = str(path)
    return paths


class Reference:
    """Hugging Face eager models in float32, one per version."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.models = {
            version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
            for version, path in paths.items()
        }

    def plain(self, version: str, tokens: Sequence[int]) -> Any:
        """Log-prob of each token but the first, given all before it, under one version: [len - 1]."""
        import torch

        return self.rows(version, tokens).gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]

    def rows(self, version: str, tokens: Sequence[int]) -> Any:
        """Log-probs of the whole vocabulary after each token but the last, under one version: [len - 1, vocabulary]."""
        import torch

        with torch.no_grad():
            logits = self.models[version](input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits[:-1].log_softmax(-1)

    def segment(self, tokens: Sequence[int], prompt_length: int, segment: Mapping[str, Any]) -> list[float]:
        """Log-probs of one kv_provenance segment's output tokens: its context is built span by span, each span with
        the version that is said to have computed it, and each token is scored by the pass that computed the KV before
        it. The KV of position p and the logits for token p + 1 come from one pass of one version."""
        import torch

        past, scores = None, {}
        with torch.no_grad():
            for span in segment["context"]:
                piece = torch.tensor([list(tokens[span["start"] : span["end"]])])
                out = self.models[span["version"]](input_ids=piece, past_key_values=past, use_cache=True)
                past = out.past_key_values
                logs = out.logits[0].log_softmax(-1)
                for index in range(piece.shape[1]):
                    position = span["start"] + index + 1
                    if position < len(tokens):
                        scores[position] = float(logs[index, tokens[position]])
        return [scores[prompt_length + i] for i in range(segment["start"], segment["end"])]
