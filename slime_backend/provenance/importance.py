"""Importance weights of tokens that older weights sampled: truncated, and 0 where a stale token's ratio isn't trusted.

Sources: local_trainer/grpo.py, which has the loss that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedRatios:
    """How far the trainer's probability of a token may lie from the sampler's."""

    ratio_bound: float = 2.0  # of the importance weight; 2 is what Yao et al. use
    ratio_low: float = 0.5  # a stale token is masked where its weight is under this
    ratio_high: float = 5.0  # or over this

    def __post_init__(self) -> None:
        if self.ratio_bound < 1:
            raise ValueError(f"ratio_bound={self.ratio_bound} would shrink on-policy samples too; give at least 1")
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(
                f"ratio_low={self.ratio_low}, ratio_high={self.ratio_high} leave out 1, the weight of a token that is "
                "on-policy"
            )


def importance_weights(ratios: Tensor, stale: Tensor, trusted: TrustedRatios) -> Tensor:
    """The weight of each token: its ratio up to ratio_bound; 0 for a stale one that leaves ratio_low .. ratio_high.

    `ratios` and `stale` (bool) have shape (tokens,), and so has the result.
    """
    outside = (ratios < trusted.ratio_low) | (ratios > trusted.ratio_high)
    return ratios.clamp(max=trusted.ratio_bound).masked_fill(stale & outside, 0.0)
