"""This module runs an exact forward (and backward) over sequences that begin with the same long prompt.

    prefix = SharedPrefix.run(model, prompts)      the common prefix, once, with gradient
    leaves = prefix.detached()                     its KV as leaves, so that micro-batches do not share a graph
    for part in parts:
        loss(suffix_logprobs(model, leaves, part)).backward()
    prefix.backward(leaves)                        what all parts left on the KV flows into the weights, once

Suffixes are padded on the right: causal attention hides what comes later, so no row sees its padding and every
position keeps the number that it has alone. With 64 rollouts of 1100 + 64 tokens the model runs on about 7 thousand
tokens instead of 75 thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

Row = tuple[Sequence[int], Sequence[int]]  # prompt ids, output ids


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """This has the KV of the first `length` prompt tokens: per layer a key and a value (1, kv heads, length, dim)."""

    ids: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def length(self) -> int:
        return len(self.ids)

    @classmethod
    def run(cls, model: Any, prompts: Sequence[Sequence[int]]) -> SharedPrefix:
        """Find the longest common prefix of `prompts` and compute its KV, with gradient unless grad is disabled."""
        length = common_prefix_length(prompts)
        if length == 0:
            return cls((), ())
        ids = tuple(prompts[0][:length])
        # Without the config every layer keeps all positions; a sliding-window layer gets its window from the mask,
        # which is exact. The cache that drops what is out of the window would save nothing here.
        cache = DynamicCache()
        model.base_model(input_ids=torch.tensor([ids], device=_device_of(model)), past_key_values=cache, use_cache=True)
        return cls(ids, tuple((layer.keys, layer.values) for layer in cache.layers))

    def detached(self) -> SharedPrefix:
        """Return the same KV detached from its graph, ready to collect gradients."""
        return SharedPrefix(
            self.ids,
            tuple((k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.layers),
        )

    def backward(self, leaves: SharedPrefix) -> None:
        """Send the gradients collected by `leaves` (made by `detached`) on into the weights."""
        pairs = [
            (tensor, leaf.grad)
            for mine, theirs in zip(self.layers, leaves.layers, strict=True)
            for tensor, leaf in zip(mine, theirs, strict=True)
            if leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def cache(self, rows: int) -> DynamicCache:
        """Return a new cache that holds this prefix for `rows` sequences, as views: nothing is copied here."""
        cache = DynamicCache()
        for index, (key, value) in enumerate(self.layers):
            cache.update(key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1), index)
        return cache


def _device_of(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, less one where no prompt token would be left.

    The last prompt token predicts the first output token, so each row must run at least that one itself.
    """
    if not prompts:
        return 0
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))  # whatever these two share, all between share
    limit = min(map(len, prompts)) - 1
    for position, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b or position == limit:
            return min(position, limit)
    return max(0, limit)


def suffix_logprobs(
    model: Any, prefix: SharedPrefix, rows: Sequence[Row], temperatures: Sequence[float] | None = None
) -> list[Tensor]:
    """Return the log-prob of each row's output tokens given prompt and earlier output: one (length,) per row.

    `temperatures`: of every output token, in the order of the rows; None: 1. Every prompt must begin with `prefix`.
    Only output positions go through the output layer, since the logits of a large vocabulary are the largest tensor
    of a step.
    """
    suffixes = [list(prompt[prefix.length :]) + list(output[:-1]) for prompt, output in rows]
    starts = [len(prompt) - prefix.length - 1 for prompt, _ in rows]
    width = max(map(len, suffixes))
    device = _device_of(model)
    ids = torch.tensor([s + [0] * (width - len(s)) for s in suffixes], device=device)
    positions = torch.arange(prefix.length, prefix.length + width, device=device).unsqueeze(0)
    past = {"past_key_values": prefix.cache(len(rows)), "use_cache": True} if prefix.length else {"use_cache": False}
    hidden = model.base_model(input_ids=ids, position_ids=positions, **past).last_hidden_state
    chosen = [hidden[i, start : start + len(rows[i][1])] for i, start in enumerate(starts)]
    logits = model.get_output_embeddings()(torch.cat(chosen)).float()
    if temperatures is not None:
        logits = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device).unsqueeze(1)
    targets = torch.tensor([token for _, output in rows for token in output], device=logits.device)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)
    return list(logprobs.split([len(output) for _, output in rows]))
