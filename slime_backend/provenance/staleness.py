"""How far behind the trainer each token of a rollout was sampled, and what to do with what lies too far behind.

    lag of a token  = the trainer's version - the version that sampled it, both as numbers of publications

    policy        what happens beyond `max_version_lag`
    drop          a rollout with any such token is not trained on; nor is its group, if fewer than two are left
    mask_tokens   such tokens get no loss; the rollout's other tokens and its reward still count
    correct       such tokens are trained on with a truncated importance weight, as all are, and masked where the
                  ratio of the trainer's probability to that of the version that sampled them leaves a trusted range

Without a bound nothing is too stale and the policies are one. What `correct` computes per token is in
local_trainer/grpo.py; here is only who is concerned. Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_backend.provenance.errors import StalenessError
from slime_backend.wire import Span

StalenessPolicy = Literal["drop", "mask_tokens", "correct"]
Action = Literal["train", "drop", "mask", "correct"]
Reason = Literal["within_bound", "lag_over_bound", "group_too_small"]

SMALLEST_GROUP = 2  # a group-relative advantage needs something to compare with
LABELS = (
    "train_within_bound",
    "drop_lag_over_bound",
    "drop_group_too_small",
    "mask_lag_over_bound",
    "correct_lag_over_bound",
)


@dataclass(frozen=True, slots=True)
class LagSpan:
    """Output tokens start .. end (end excluded), sampled `lag` versions before the one that the trainer is at."""

    start: int
    end: int
    lag: int


@dataclass(frozen=True, slots=True)
class RolloutLag:
    """The lag of one rollout's output tokens."""

    receipt: str
    spans: tuple[LagSpan, ...]

    @property
    def tokens(self) -> int:
        return sum(s.end - s.start for s in self.spans)

    @property
    def total(self) -> int:
        """Summed over tokens."""
        return sum(s.lag * (s.end - s.start) for s in self.spans)

    @property
    def max(self) -> int:
        return max((s.lag for s in self.spans), default=0)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.tokens)

    def per_token(self) -> tuple[int, ...]:
        return tuple(s.lag for s in self.spans for _ in range(s.end - s.start))

    def beyond(self, bound: int | None) -> tuple[int, ...]:
        """Per output token: 1 where its lag is over the bound, else 0."""
        return tuple(int(bound is not None and lag > bound) for lag in self.per_token())


@dataclass(frozen=True, slots=True)
class BatchLag:
    """The lag of a batch: mean over tokens, largest, and how many tokens have each lag."""

    tokens: int
    mean: float
    max: int
    by_lag: dict[int, int]  # lag -> tokens

    @classmethod
    def of(cls, rollouts: Iterable[RolloutLag]) -> BatchLag:
        by_lag: Counter[int] = Counter()
        for rollout in rollouts:
            for span in rollout.spans:
                by_lag[span.lag] += span.end - span.start
        tokens = sum(by_lag.values())
        total = sum(lag * count for lag, count in by_lag.items())
        return cls(tokens, total / max(1, tokens), max(by_lag, default=0), dict(sorted(by_lag.items())))


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one rollout, and why. `beyond`: per output token, 1 where its lag is over the bound."""

    lag: RolloutLag
    action: Action
    reason: Reason
    beyond: tuple[int, ...]

    @property
    def label(self) -> str:
        """One of LABELS."""
        return f"{self.action}_{self.reason}"

    def to_json(self) -> dict[str, Any]:
        """For the log: everything but the per-token marks, which the spans of the record give again."""
        return {
            "receipt": self.lag.receipt,
            "action": self.action,
            "reason": self.reason,
            "lag_max": self.lag.max,
            "lag_mean": self.lag.mean,
            "tokens": self.lag.tokens,
            "tokens_over_bound": sum(self.beyond),
        }


def rollout_lag(receipt: str, spans: Sequence[Span], trainer_version: int, number: Callable[[str], int]) -> RolloutLag:
    """The lag of a rollout with these sampled spans, for a trainer at publication `trainer_version`.

    `number` turns a version's name into its number of publications. Raises StalenessError for a name that has none, and
    for a version that the trainer has not reached: both mean that an engine serves what this trainer didn't publish.
    """
    found = []
    for span in spans:
        try:
            lag = trainer_version - number(span.version)
        except ValueError:
            raise StalenessError(
                f"rollout {receipt} was sampled by version {span.version!r}, which this trainer never published"
            ) from None
        if lag < 0:
            raise StalenessError(
                f"rollout {receipt} was sampled by version {span.version}, {-lag} ahead of the trainer: "
                "does another trainer publish to these engines?"
            )
        found.append(LagSpan(span.start, span.end, lag))
    return RolloutLag(receipt, tuple(found))


def decide(groups: Sequence[Sequence[RolloutLag]], policy: StalenessPolicy, bound: int | None) -> list[list[Decision]]:
    """One decision per rollout, in the same order and grouping. `bound` None: nothing is too stale."""
    return [_decide_group(group, policy, bound) for group in groups]


def _decide_group(group: Sequence[RolloutLag], policy: StalenessPolicy, bound: int | None) -> list[Decision]:
    action: dict[StalenessPolicy, Action] = {"drop": "drop", "mask_tokens": "mask", "correct": "correct"}
    decisions = []
    for lag in group:
        beyond = lag.beyond(bound)
        if any(beyond):
            decisions.append(Decision(lag, action[policy], "lag_over_bound", beyond))
        else:
            decisions.append(Decision(lag, "train", "within_bound", beyond))
    kept = sum(d.action != "drop" for d in decisions)
    if kept < min(SMALLEST_GROUP, len(group)):
        return [Decision(d.lag, "drop", "group_too_small", d.beyond) if d.action != "drop" else d for d in decisions]
    return decisions


def count(decisions: Iterable[Decision]) -> dict[str, int]:
    """Label -> rollouts, with a 0 for each label that doesn't occur, and the tokens over the bound by what became of
    them."""
    rollouts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for decision in decisions:
        rollouts[decision.label] += 1
        tokens[decision.action] += decision.lag.tokens if decision.action == "drop" else sum(decision.beyond)
    return {
        **{label: rollouts[label] for label in LABELS},
        "tokens_dropped": tokens["drop"],
        "tokens_masked": tokens["mask"],
        "tokens_corrected": tokens["correct"],
    }
