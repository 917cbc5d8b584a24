"""The class of a stored turn and of a trajectory: that of its KV (provenance/classes.py), or `not_auditable`.

Penalties, min_tokens and grammars change the distribution that is sampled from: the log-probs are then no model's own,
whatever KV they were computed from, and nobody can recompute them from the weights. So such a turn isn't `pure`.
"""

from __future__ import annotations

from typing import Literal, get_args

from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import not_auditable

NOT_AUDITABLE = "not_auditable"
TurnClass = Literal["pure", "recomputed", "mixed", "carried", "not_auditable"]
TURN_CLASSES: tuple[TurnClass, ...] = get_args(TurnClass)  # weakest first


def class_of(record: RolloutRecord) -> str:
    return NOT_AUDITABLE if not_auditable(record.sampling) else record.rollout_class


def stronger(one: str, other: str) -> str:
    """The class of both together. "" (unknown) wins: a trajectory is known only where all of it is."""
    if not one or not other:
        return ""
    return max(one, other, key=TURN_CLASSES.index)
