"""Computes output tokens' log-probs again, over KV that is built version by version.

A token sampled by version v over KV that versions u, v, ... computed can be recomputed exactly: build the KV position
by position with the version that the record names, then score.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import DynamicCache

from slime_backend.errors import ReefError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import scored_temperature
from slime_backend.weight_sources.checkpoint_check import read_header
from slime_backend.wire import KvSegment, Span

MODELS_IN_MEMORY = 4
HALF = frozenset(("BF16", "F16"))  # safetensors' names

LoadModel = Callable[[Path], Any]  # directory -> a Hugging Face causal LM in eval mode


class WeightsGoneError(ReefError, RuntimeError):
    """The weights of a version aren't on disk (anymore)."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Where `version` is claimed to have computed, these tensors were those of `other`: an update that came in part."""

    version: str
    other: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """KV of a prompt's positions, all by one version: per layer a key and a value (1, kv heads, length, dim)."""

    ids: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    def shared_with(self, tokens: Sequence[int], limit: int) -> int:
        length = 0
        for mine, other in zip(self.ids[:limit], tokens, strict=False):
            if mine != other:
                break
            length += 1
        return length

    def cache(self, length: int) -> Any:
        cache = DynamicCache()
        for index, (key, value) in enumerate(self.layers):
            cache.update(key[:, :, :length], value[:, :, :length], index)
        return cache


class Scorer:
    """Scores output tokens under the weights in `weights/<version>`. Keeps a few models in memory and, per version, the
    KV of the last prompt: rollouts of a group, or under one system prompt, compute it once. Not thread-safe.
    """

    def __init__(self, weights: Path, load_model: LoadModel) -> None:
        self.weights = weights
        self._load = load_model
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._prefixes: dict[str, _Prefix] = {}

    def knows(self, version: str) -> bool:
        return version in self._models or (self.weights / version / "config.json").is_file()

    def versions(self) -> list[str]:
        """Those on disk, in the order of their numbers."""
        return sorted((p.name for p in self.weights.iterdir() if self.knows(p.name)), key=lambda n: (len(n), n))

    def is_half(self, version: str) -> bool:
        """Whether the weights on disk are of 16 bits, as the engine computes then. Reads a header."""
        files = sorted((self.weights / version).glob("*.safetensors"))
        kinds = {header.dtype for file in files[:1] for header in read_header(file).values()}
        return bool(kinds) and kinds <= HALF

    def model(self, version: str) -> Any:
        """Raises WeightsGoneError for a version that isn't on disk, also one that is removed while it is loaded."""
        if version in self._models:
            self._models.move_to_end(version)
            return self._models[version]
        try:
            self._models[version] = self._load(self.weights / version)
        except Exception as error:
            if self.knows(version):
                raise
            raise WeightsGoneError(f"{self.weights / version} is not there") from error
        if len(self._models) > MODELS_IN_MEMORY:
            gone, _ = self._models.popitem(last=False)
            self._prefixes.pop(gone, None)
        return self._models[version]

    def differing_tensors(self, version: str, other: str) -> list[str]:
        """Names of the parameters that differ between two versions, in the order of the model."""
        theirs = dict(self.model(other).named_parameters())
        return [
            name
            for name, mine in self.model(version).named_parameters()
            if name in theirs and not torch.equal(mine, theirs[name])
        ]

    def score_all(self, record: RolloutRecord, segments: Sequence[KvSegment], mix: Mix | None = None) -> list[float]:
        """`score` of each segment in turn: every output token, where the segments cover the output."""
        return [x for segment in segments for x in self.score(record, segment, mix)]

    @torch.no_grad()
    def score(self, record: RolloutRecord, segment: KvSegment, mix: Mix | None = None) -> list[float]:
        """Log-probs (natural, at the record's temperature) of output tokens segment.start..segment.end.

        The logits at position p, which the next token is sampled from, belong to the version that computed p's KV.
        """
        tokens = (*record.prompt_ids, *record.output_ids[: segment.end])
        first = len(record.prompt_ids) + segment.start - 1  # the position whose logits sampled the first token
        rows: list[Tensor] = []
        # Without a config it holds every position; windows come from the mask, which is exact.
        past: Any = DynamicCache()
        for span, forward in self._pieces(segment.context, mix):
            begin = span.start
            if begin == 0 and forward is None:
                past, begin = self._reused(span, tokens, first)
            keep = max(0, span.end - max(first, begin))
            output = (forward or self.model(span.version))(
                input_ids=torch.tensor([tokens[begin : span.end]]),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=max(1, keep),  # 0 would mean all of them
            )
            past = output.past_key_values
            if keep:
                rows.append(output.logits[0, -keep:])
            if span.start == 0 and forward is None:
                self._remember(span, tokens[: len(record.prompt_ids)], past)
        logprobs = (torch.cat(rows).float() / scored_temperature(record.temperature)).log_softmax(-1)
        sampled = torch.tensor(tokens[first + 1 : first + 1 + len(logprobs)])
        return [float(x) for x in logprobs.gather(1, sampled[:, None])[:, 0]]

    def _pieces(self, context: Sequence[Span], mix: Mix | None) -> Iterator[tuple[Span, Callable[..., Any] | None]]:
        """Each span with what computes it instead of its version's own model, if anything."""
        for span in context:
            if mix is None or span.version != mix.version:
                yield span, None
                continue
            model, others = self.model(mix.version), dict(self.model(mix.other).named_parameters())
            tensors = {name: others[name] for name in mix.names}

            def forward(model: Any = model, tensors: dict[str, Tensor] = tensors, **inputs: Any) -> Any:
                return functional_call(model, tensors, (), inputs)

            yield span, forward

    def _reused(self, span: Span, tokens: Sequence[int], first: int) -> tuple[Any, int]:
        """KV that is there already, and how many positions. The position whose logits are needed is computed again."""
        prefix = self._prefixes.get(span.version)
        length = prefix.shared_with(tokens, min(span.end - 1, first)) if prefix else 0
        return (prefix.cache(length), length) if prefix and length else (DynamicCache(), 0)

    def _remember(self, span: Span, prompt: Sequence[int], past: Any) -> None:
        ids = tuple(prompt[: span.end])
        self._prefixes[span.version] = _Prefix(
            ids, tuple((layer.keys[:, :, : len(ids)], layer.values[:, :, : len(ids)]) for layer in past.layers)
        )
