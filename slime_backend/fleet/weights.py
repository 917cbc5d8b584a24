"""What a fleet knows of its engines' weights by their content: the digests of the version in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slime_backend.engine_client.weight_digests import RankDigests

VerifyWeights = Literal["auto", "full", "sample", "off"]


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights of one engine's processes, as they digested them themselves."""

    instances: frozenset[str]  # of the scheduler processes
    version: str | None  # that they were confirmed at; None: of unknown origin
    ranks: Sequence[RankDigests]
    unseen: frozenset[str]  # tensors outside the last sample: what is known of them is of an earlier version
    # The tensors of each rank whose digest was once that of what was sent, with the dtype that was sent: from then on
    # it has to be. An engine may convert a tensor, so nothing can be demanded of the others, nor of another dtype.
    comparable: Sequence[dict[str, str]]

    def learn(self, sent: Mapping[str, Sequence[str]]) -> None:
        """Note which tensors the engine has as they were sent."""
        for rank, names in zip(self.ranks, self.comparable, strict=True):
            now = rank.digests.items()
            names |= {n: sent[n][0] for n, digest in now if n not in self.unseen and digest in sent.get(n, ())[1:]}


@dataclass(slots=True)
class WeightRecords:
    """The digests of one fleet's weights, kept from one publication to the next."""

    mode: VerifyWeights = "auto"
    # Of the version in force, by its source's names: a tensor's dtype, and a digest for each of its forms.
    sent: Mapping[str, Sequence[str]] | None = None
    served: dict[str, ServedWeights] = field(default_factory=dict)  # by engine
    without: dict[str, tuple[frozenset[str], str]] = field(
        default_factory=dict
    )  # engine -> (instances, why no digests)
    slowest_ms: float = 0.0  # that the slowest engine needs for all of its tensors, by its last digests
    publications: int = 0  # decides which sample is next
