"""What an engine says about the content of its weights: SGLang's own digest of each tensor, by rank.

`POST /weights_checker {"action": "checksum"}` is served by every SGLang from 0.5.15.post1 to 0.5.23
(srt/utils/weight_checker.py). Digests are of the tensors that a rank computes with: fused, sharded and converted as its
layout wants it, target and draft model alike; buffers that follow from the config are left out, and a quantized weight
is digested dequantized. On a CPU a digest is the first 8 bytes of the SHA-256 of the tensor's bytes (0.5.23,
srt/managers/mm_utils.py, tensor_hash), on a GPU a hash of SGLang's own. Before 0.5.22 the call fails on a machine
without an NVIDIA driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATH = "/weights_checker"
Place = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class RankDigests:
    """The digest of each tensor of one rank, by SGLang's names; a draft model's begin with its role ("draft.")."""

    place: Place  # tensor rank, of how many, pipeline rank, of how many
    digests: Mapping[str, str]

    @property
    def is_sharded(self) -> bool:
        return self.place[1] > 1

    def __str__(self) -> str:
        tensor, size, stage, stages = self.place
        parts = [f"tensor rank {tensor}"] * (size > 1) + [f"stage {stage}"] * (stages > 1)
        return ", ".join(parts) or "its rank"


def read_digests(answer: Any) -> list[RankDigests]:
    """The ranks of an answer, one for each data-parallel, pipeline and tensor rank. Raises ValueError."""
    try:
        return [_rank(rank) for rank in answer["ranks"]]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no digests of ranks ({type(error).__name__}: {error})") from error


def _rank(rank: Mapping[str, Any]) -> RankDigests:
    at = rank["parallelism_info"]
    if isinstance(at, list):  # one for the target and one for each draft model, all in one place
        at = at[0]
    place = (int(at["tp_rank"]), int(at["tp_size"]), int(at["pp_rank"]), int(at["pp_size"]))
    return RankDigests(place, {str(name): str(digest) for name, digest in rank["checksums"].items()})
