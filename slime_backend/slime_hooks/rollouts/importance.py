"""`--staleness correct` inside slime: `--custom-tis-function-path slime_backend.slime_hooks.importance.correct`.

Per token, with the trainer's probability p and that of the version that sampled it, q:

    weight = min(p / q, tis_clip)        truncated importance sampling, as slime's own
    weight = 0                           where p / q leaves ratio_low .. ratio_high (0.5 and 5)

Both are at `--rollout-temperature`: slime samples at it and divides its trainer's logits by it (slime 0.3.1,
backends/megatron_utils/loss.py), so p / q is 1 where the weights are the same, whatever the temperature. A custom
rollout function that samples at another one would break that; turns of a gateway that did are masked
(reef_service/slime_rollout.py).

The local trainer gives weight 0 to tokens over `--max-version-lag` only. slime's trainer doesn't know which these are
(no field of its training data could carry it), so here the trusted range holds for every token; a fresh token's ratio
is 1 up to rounding and stays inside. Sources of both formulas: local_trainer/grpo.py, which computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_backend.provenance.importance import TrustedRatios, importance_weights


def correct(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """`pg_loss`: (tokens,), every response token of the micro-batch in one row; the lists have a tensor per response.

    Returns the weighted loss, the masks as they came, and figures per token, which slime reduces to a mean over the
    tokens that have a loss and logs as train/<name>: `tis`, `tis_abs` and `tis_clipfrac` mean what they mean in slime;
    `reef_masked_ratio_low` and `reef_masked_ratio_high` are the shares with weight 0, by the side that was left.
    """
    trusted = TrustedRatios(ratio_bound=float(args.tis_clip))
    ratios = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    weights = importance_weights(ratios, torch.ones_like(ratios, dtype=torch.bool), trusted)
    figures = {
        "tis": ratios,
        "tis_abs": (ratios - 1).abs(),
        "tis_clipfrac": (weights != ratios).float(),
        "reef_masked_ratio_low": (ratios < trusted.ratio_low).float(),
        "reef_masked_ratio_high": (ratios > trusted.ratio_high).float(),
    }
    return pg_loss * weights, loss_masks, {name: figure.detach() for name, figure in figures.items()}
