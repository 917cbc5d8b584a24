"""The staleness policy on slime's samples. Duck-typed: no slime, no torch. Who is concerned is decided in
provenance/staleness.py; here is what slime is given:

    drop          sample.remove_sample = True: slime gives it no loss. Its reward stays in its group's baseline
    mask_tokens   sample.loss_mask = 0 at the tokens over the bound
    correct       nothing here: weights are computed per token in the trainer (importance.py)

The version that the trainer stands at when it trains on rollout r is known before, since slime publishes on a schedule:

    train.py         once before the first rollout, and after each training step
    train_async.py   once before the first rollout, and after each step k with (k + 1) % update_weights_interval == 0,
                     so that a rollout which is generated during a training step is a version behind when its turn comes
    disk delta       the first of these is the baseline and no version
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from slime_backend.provenance.errors import StalenessError
from slime_backend.provenance.staleness import (
    Decision,
    LagSpan,
    RolloutLag,
    StalenessPolicy,
    decide,
    rollout_lag,
)
from slime_backend.slime_hooks.rollouts.generate_calls import notes, response_spans
from slime_backend.slime_hooks.rollouts.ledger import group_name, has_calls, leaves
from slime_backend.wire import Span

BASE_VERSION = "default"  # what SGLang calls the weights that an engine was started with


def trainer_version(args: Any, rollout_id: int, first_rollout: int) -> int:
    """The version that the trainer stands at when it trains on rollout `rollout_id` of a run that began with rollout
    `first_rollout`.

    Reads `args.update_weight_start_version`, `update_weight_mode`, and for train_async (`args.reef_asynchronous`)
    `update_weights_interval` and `release_train`.
    """
    if getattr(args, "debug_rollout_only", False):
        return first_version(args)
    interval = 1
    if getattr(args, "reef_asynchronous", False) and not getattr(args, "release_train", False):
        interval = getattr(args, "update_weights_interval", None) or 1
    after_steps = rollout_id // interval - first_rollout // interval
    baseline = 0 if getattr(args, "update_weight_mode", "full") == "delta" else 1
    return first_version(args) + baseline + after_steps


def first_version(args: Any) -> int:
    """The number of the weights that the engines were started with."""
    return int(getattr(args, "update_weight_start_version", None) or 0)


def version_number(args: Any) -> Callable[[str], int]:
    """slime counts its versions: "1", "2", ..."""
    return lambda version: first_version(args) if version == BASE_VERSION else int(version)


def lag_of(sample: Any, trainer_at: int, number: Callable[[str], int], oldest: int) -> RolloutLag:
    """The lag of a sample's response. Tokens that slime trains on and that no call accounts for count as sampled by
    version `oldest`: what isn't known to be fresh is not fresh.

    Raises StalenessError for a version that this trainer never published, or hasn't reached.
    """
    receipt = f"{group_name(sample)}/{sample.index}"
    spans = response_spans(sample)
    lag = rollout_lag(receipt, spans, trainer_at, number)
    unknown = [LagSpan(s.start, s.end, trainer_at - oldest) for s in _unaccounted(sample, spans)]
    return RolloutLag(receipt, tuple(sorted((*lag.spans, *unknown), key=lambda s: s.start)))


def apply_staleness(
    samples: Any, *, policy: StalenessPolicy, bound: int | None, trainer_at: int, args: Any
) -> list[Decision]:
    """Decide on every sample of a batch, mark the samples accordingly and return the decisions.

    `samples`: groups of samples, as slime's rollout functions return them; samples of one prompt are judged together,
    however they are nested. Raises StalenessError where a bound is asked for and no
    sample says who sampled it.
    """
    groups: dict[str, list[Any]] = defaultdict(list)
    for sample in leaves(samples):
        groups[group_name(sample)].append(sample)
    if bound is not None and groups and not any(has_calls(s) for group in groups.values() for s in group):
        raise StalenessError(
            f"max_version_lag={bound}, but no rollout says which weights sampled it: is the hook kv_spans active in "
            "the engines, and does the rollout function hand SGLang's meta_info to Sample.append_response_tokens?"
        )
    number, oldest = version_number(args), first_version(args)
    lags = [[lag_of(sample, trainer_at, number, oldest) for sample in group] for group in groups.values()]
    decided = decide(lags, policy, bound)
    for group, decisions in zip(groups.values(), decided, strict=True):
        for sample, decision in zip(group, decisions, strict=True):
            _mark(sample, decision, bound)
    return [decision for decisions in decided for decision in decisions]


def _mark(sample: Any, decision: Decision, bound: int | None) -> None:
    notes(sample)["staleness"] = {k: v for k, v in decision.to_json().items() if k != "receipt"}
    if decision.action == "drop":
        sample.remove_sample = True
    elif decision.action == "mask":
        mask = list(sample.loss_mask) if sample.loss_mask is not None else [1] * sample.response_length
        for span in decision.lag.spans:
            if bound is not None and span.lag > bound:
                mask[span.start : span.end] = [0] * (span.end - span.start)
        sample.loss_mask = mask


def _unaccounted(sample: Any, spans: Sequence[Span]) -> list[Span]:
    """Runs of response tokens with a loss that lie in no span."""
    mask = list(sample.loss_mask) if sample.loss_mask is not None else [1] * sample.response_length
    for span in spans:
        mask[span.start : span.end] = [0] * (span.end - span.start)
    runs: list[Span] = []
    for position, trained in enumerate(mask):
        if not trained:
            continue
        if runs and runs[-1].end == position:
            runs[-1] = Span("", runs[-1].start, position + 1)
        else:
            runs.append(Span("", position, position + 1))
    return runs
