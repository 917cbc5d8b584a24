"""The figures of a training step: the columns of steps.jsonl that the trainer fills. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a step saw. Log-prob figures are over trained tokens, before the step's update."""

    loss: float
    grad_norm: float  # before clipping
    reward_mean: float
    reward_std: float
    samples: int
    tokens: int  # trained tokens
    groups_without_signal: int  # groups whose rewards were all equal
    ratio_mean: float
    ratio_max: float
    clipped_share: float  # share of tokens whose weight was cut at the bound
    stale_tokens: int  # tokens over the lag bound under the policy `correct`
    masked_ratio_low: int  # of these, tokens with weight 0 because their ratio was under ratio_low
    masked_ratio_high: int  # or over ratio_high
    entropy: float  # nats per token, estimated by -log p_now of the sampled tokens
    logprob_gap_mean: float  # mean |log p_now - log p_engine|: staleness and numerical mismatch together
    shared_prefix: int  # tokens of the common prefix, run once instead of once per sample
    tokens_at_lag_0: int = 0  # sampled by these very weights, from KV that they computed
    logprob_gap_at_lag_0: float | None = None  # mean over these of |log p_now - log p_engine|: mismatch alone

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
