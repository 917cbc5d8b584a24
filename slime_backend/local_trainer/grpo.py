"""`grpo_step` runs one optimisation step of GRPO on rollouts that an engine sampled under older weights.

    rewards of a group of n answers to one prompt  ->  advantage A_i = (r_i - mean) / (std + eps), 0 if all are equal
    ratio   w_t  = exp(log p_now(t) - log p_engine(t)), the engine's recorded log-prob being the behaviour policy,
                   both at the temperature that the token was sampled at
    loss         = - mean over tokens of  min(w_t, bound) * A_i * log p_now(t),  the weight taken as a constant

A token that the staleness policy `correct` marks as stale has weight 0 where w_t leaves ratio_low .. ratio_high; it
still counts in the mean, since its share was fixed before its ratio was known.

Sources: group-relative advantages, Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1; truncated importance
sampling, Ionides 2008, J. Comput. Graph. Stat. 17(2), applied to the gap between rollout engine and trainer by Yao et
al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; token-level normalisation, Yu et
al. 2025, DAPO, arXiv:2503.14476; masking of a weight that leaves a trusted range, with its bounds 0.5 and 5, Ling Team
2025, "Every Step Evolves" (IcePop), arXiv:2510.18855. There is no PPO clip: a batch is used for one step only, so the
only distance from the behaviour policy is staleness, which the weight corrects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slime_backend.local_trainer.shared_prefix import SharedPrefix, suffix_logprobs
from slime_backend.provenance.importance import TrustedRatios, importance_weights
from slime_backend.provenance.sampling_params import GREEDY_BELOW, scored_temperature
from slime_backend.tracking.columns import StepMetrics


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample is one finished rollout, as the engine returned it."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]  # one per output token, at its temperature, by the version that sampled it
    reward: float
    group: str | int = 0  # samples of one group answer the same prompt
    versions: tuple[str, ...] = ()  # weight versions that sampled its tokens, oldest first
    loss_mask: Sequence[int] | None = None  # per output token, 0 = not trained on; None = all are
    stale: Sequence[int] | None = None  # per output token, 1 = masked where its ratio isn't trusted; None = none is
    temperature: float | Sequence[float] = 1.0  # at which it was sampled: one value, or one per output token
    # Per output token, 1 = sampled by the weights that are trained, from KV that they computed: its ratio should be 1.
    fresh: Sequence[int] | None = None

    def __post_init__(self) -> None:
        length = len(self.output_ids)
        if not length or not self.prompt_ids:
            raise ValueError(f"group {self.group}: a sample needs a prompt and at least one output token")
        if len(self.behaviour_logprobs) != length:
            raise ValueError(f"group {self.group}: {len(self.behaviour_logprobs)} log-probs for {length} output tokens")
        if self.loss_mask is not None and len(self.loss_mask) != length:
            raise ValueError(f"group {self.group}: a loss mask of {len(self.loss_mask)} for {length} output tokens")
        if self.stale is not None and len(self.stale) != length:
            raise ValueError(f"group {self.group}: {len(self.stale)} marks of staleness for {length} output tokens")
        if self.fresh is not None and len(self.fresh) != length:
            raise ValueError(f"group {self.group}: {len(self.fresh)} marks of freshness for {length} output tokens")
        if len(self.temperatures) != length:
            raise ValueError(f"group {self.group}: {len(self.temperatures)} temperatures for {length} output tokens")
        for position, temperature in enumerate(self.temperatures):
            trained = self.loss_mask is None or self.loss_mask[position]
            if not math.isfinite(temperature) or (trained and temperature < GREEDY_BELOW):
                raise ValueError(
                    f"group {self.group}: output token {position} was sampled at temperature {temperature:g}: a greedy "
                    "choice has no importance weight; sample at a temperature over 0, or mask it out"
                )
        if not math.isfinite(self.reward) or not all(map(math.isfinite, self.behaviour_logprobs)):
            raise ValueError(f"group {self.group}: reward and behaviour log-probs must be finite")

    @property
    def temperatures(self) -> Sequence[float]:
        """Return one temperature per output token."""
        if isinstance(self.temperature, int | float):
            return [float(self.temperature)] * len(self.output_ids)
        return self.temperature

    @property
    def divisors(self) -> list[float]:
        """Return what the logits of each output token are divided by; 1 for a greedy one, which is never trained on."""
        return [scored_temperature(t) for t in self.temperatures]


@dataclass(frozen=True, slots=True)
class GrpoConfig(TrustedRatios):
    """These are the settings of a step. The defaults are those measured for the tiny model."""

    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    normalise: Literal["token", "sequence"] = "token"  # mean over tokens, or over sequences of their token means
    advantage_epsilon: float = 1e-6
    micro_batch: int = 16  # samples per forward; bounds memory, does not change the gradient

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.max_grad_norm <= 0 or self.micro_batch < 1:
            raise ValueError("learning_rate and max_grad_norm must be positive, micro_batch at least 1")
        TrustedRatios.__post_init__(self)
        if self.normalise not in ("token", "sequence"):
            raise ValueError(f"normalise={self.normalise!r}; choose 'token' or 'sequence'")


def group_advantages(rewards: Sequence[float], epsilon: float = 1e-6) -> list[float]:
    """Return (r - mean) / (population std + epsilon) inside one group.

    A group whose rewards are all equal carries no preference: its advantages are exactly 0, also where rounding leaves
    a std that is not (the division would blow the rounding error up to size 1).
    """
    if not rewards:
        return []
    if max(rewards) - min(rewards) <= epsilon:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + epsilon) for r in rewards]


def policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor, stale: Tensor, config: GrpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss and the importance weight of every token, both over all tokens concatenated.

    All tensors have shape (tokens,): log-probs now (with gradient), those of the version that sampled each token, each
    token's advantage, its share of the normalisation (0 = masked out; they sum to 1 over the complete step), and
    whether it is stale (bool).
    """
    importance = importance_weights((logprobs.detach() - behaviour).exp(), stale, config)
    return -(weights * importance * advantages * logprobs).sum(), importance


def token_logprobs(model: Any, samples: Sequence[Sample]) -> list[Tensor]:
    """Return the log-prob of every output token under `model`: one (output length,) per sample, with gradient.

    It is at the sample's temperature.
    """
    prefix = SharedPrefix.run(model, [s.prompt_ids for s in samples])
    return _sample_logprobs(model, prefix, samples)


def _sample_logprobs(model: Any, prefix: SharedPrefix, samples: Sequence[Sample]) -> list[Tensor]:
    divisors = [t for s in samples for t in s.divisors]
    rows = [(s.prompt_ids, s.output_ids) for s in samples]
    return suffix_logprobs(model, prefix, rows, None if all(t == 1.0 for t in divisors) else divisors)


def make_optimizer(model: Any, config: GrpoConfig) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=config.betas, eps=1e-8)


@dataclass(slots=True)
class Trained:
    """The losses of a step collect their figures here.

    For every trained token: its log-prob now, that of the version that sampled it, whether it is stale, and whether
    these weights sampled it; all (tokens,).
    """

    now: list[Tensor] = field(default_factory=list)
    behaviour: list[Tensor] = field(default_factory=list)
    stale: list[Tensor] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    signal: bool = False  # some token has a gradient
    shared_prefix: int = 0

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.cat(self.now), torch.cat(self.behaviour), torch.cat(self.stale), torch.cat(self.fresh)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This is a step's samples with their advantages and their tokens' shares, over all of the step's groups."""

    samples: list[Sample]
    advantages: list[float]
    weights: list[Tensor]  # per sample (output length,); all together sum to 1
    groups_without_signal: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]], config: GrpoConfig) -> StepBatch:
        """Make the batch of these groups. Raises ValueError where they have no sample."""
        samples = [s for group in groups for s in group]
        if not samples:
            raise ValueError("a step needs at least one sample")
        by_group = [group_advantages([s.reward for s in group], config.advantage_epsilon) for group in groups]
        return cls(
            samples,
            [a for group in by_group for a in group],
            _token_weights(samples, config.normalise),
            sum(not any(group) for group in by_group),
        )

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [s.prompt_ids for s in self.samples]

    def parts(self, config: GrpoConfig, rank: int = 0, ranks: int = 1) -> list[list[tuple[int, bool]]]:
        """Return the micro-batches of one of `ranks` processes: (sample's number, whether it counts).

        Every rank has as many, since with ZeRO each forward is an operation of all of them; a rank that has fewer
        samples runs some of another's as well, without counting them.
        """
        lengths = [len(s.prompt_ids) + len(s.output_ids) for s in self.samples]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)  # alike lengths together: little is padding
        mine = [(i, True) for i in order[rank::ranks]]
        mine += [(order[-1], False)] * (-(-len(order) // ranks) - len(mine))
        return [mine[start : start + config.micro_batch] for start in range(0, len(mine), config.micro_batch)]


def part_losses(
    model: Any,
    prefix: SharedPrefix,
    batch: StepBatch,
    parts: Sequence[Sequence[tuple[int, bool]]],
    config: GrpoConfig,
    trained: Trained,
) -> Iterator[Tensor]:
    """Yield the scalar loss of each part; their sum is the loss of the step. Fills `trained`."""
    trained.shared_prefix = prefix.length
    for part in parts:
        samples = [batch.samples[i] for i, _ in part]
        logprobs = torch.cat(_sample_logprobs(model, prefix, samples))
        engine = torch.cat([torch.tensor(s.behaviour_logprobs, dtype=torch.float32) for s in samples])
        share = torch.cat([batch.weights[i] * counts for i, counts in part])
        advantage = torch.cat([torch.full((len(batch.samples[i].output_ids),), batch.advantages[i]) for i, _ in part])
        stale = torch.cat([_marks(s, s.stale) for s in samples])
        fresh = torch.cat([_marks(s, s.fresh) for s in samples])
        engine, share, advantage, stale, fresh = (
            t.to(logprobs.device) for t in (engine, share, advantage, stale, fresh)
        )
        loss, importance = policy_loss(logprobs, engine, advantage, share, stale, config)
        trained.loss += float(loss.detach())
        counted = share > 0
        trained.now.append(logprobs.detach()[counted])
        trained.behaviour.append(engine[counted])
        trained.stale.append(stale[counted])
        trained.fresh.append(fresh[counted])
        trained.signal = trained.signal or bool((share * advantage * importance).any())
        yield loss


def grpo_step(
    model: Any, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Sample]], config: GrpoConfig
) -> StepMetrics:
    """Update `model` in place once, on complete groups; deterministic for equal inputs and one thread.

    A step without any signal (every group's rewards equal, or every token masked) leaves weights and optimizer
    untouched, since Adam's momentum would otherwise move them. Raises ValueError on an empty batch and
    FloatingPointError on a gradient that is not finite, before the weights are touched.
    """
    batch = StepBatch.of(groups, config)
    optimizer.zero_grad(set_to_none=True)
    prefix = SharedPrefix.run(model, batch.prompts)
    leaves = prefix.detached()
    trained = Trained()
    for loss in part_losses(model, leaves, batch, batch.parts(config), config, trained):
        loss.backward()
    prefix.backward(leaves)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm))
    if not math.isfinite(norm) or not math.isfinite(trained.loss):
        raise FloatingPointError(
            f"gradient norm {norm}, loss {trained.loss}: the weights were left as they were; lower learning_rate"
        )
    if trained.signal:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return step_metrics(batch, trained, config, norm)


def _marks(sample: Sample, marks: Sequence[int] | None) -> Tensor:
    if marks is None:
        return torch.zeros(len(sample.output_ids), dtype=torch.bool)
    return torch.tensor([bool(mark) for mark in marks])


def _token_weights(samples: Sequence[Sample], normalise: str) -> list[Tensor]:
    masks = [
        torch.tensor([float(bool(m)) for m in s.loss_mask])
        if s.loss_mask is not None
        else torch.ones(len(s.output_ids))
        for s in samples
    ]
    if normalise == "token":
        total = max(1.0, float(sum(m.sum() for m in masks)))
        return [m / total for m in masks]
    return [m / (m.sum().clamp(min=1.0) * len(masks)) for m in masks]


def step_metrics(batch: StepBatch, trained: Trained, config: GrpoConfig, norm: float) -> StepMetrics:
    samples = batch.samples
    now, engine, stale, fresh = trained.rows()
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    gap = now - engine
    ratios = gap.exp()
    some = bool(now.numel())  # every token may be masked out
    low, high = stale & (ratios < config.ratio_low), stale & (ratios > config.ratio_high)
    clipped = (ratios > config.ratio_bound) & ~high
    at_lag_0 = gap.abs()[fresh]
    return StepMetrics(
        loss=trained.loss,
        grad_norm=norm,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(unbiased=False)),
        samples=len(samples),
        tokens=now.numel(),
        groups_without_signal=batch.groups_without_signal,
        ratio_mean=float(ratios.mean()) if some else 1.0,
        ratio_max=float(ratios.max()) if some else 1.0,
        clipped_share=float(clipped.float().mean()) if some else 0.0,
        stale_tokens=int(stale.sum()),
        masked_ratio_low=int(low.sum()),
        masked_ratio_high=int(high.sum()),
        entropy=float(-now.mean()) if some else 0.0,
        logprob_gap_mean=float(gap.abs().mean()) if some else 0.0,
        shared_prefix=trained.shared_prefix,
        tokens_at_lag_0=at_lag_0.numel(),
        logprob_gap_at_lag_0=float(at_lag_0.mean()) if at_lag_0.numel() else None,
    )
